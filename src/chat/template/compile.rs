//! Compiles a Jinja template into instructions whose every operation is bounded and follows Python.
//!
//! The engine's own operators, filters and methods know no bound, and differ from Python's. So the compiled
//! instructions that call them are replaced by calls to the functions of [`super::operations`].

use crate::panics::catch_panic;
use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, WhitespaceConfig, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};
use regex::Regex;

/// The name of the template in the engine's messages.
const NAME: &str = "chat template";
/// A variable that is 1.
pub(super) const ONE: &str = "__one";
/// Stack of the thread that compiles: the parser recurses, and a template may nest as deep as it is long.
const STACK_BYTES: usize = 256 << 20;
/// Maximum bytes of a template. Published ones have up to 40,000.
pub const TEMPLATE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of words of a tag.
const TOKENS_MAX: usize = 2_000;
/// Methods of a dictionary. In Jinja, the attribute of such a name is the method, whatever the keys.
const DICT_METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// A filter of [`super::operations`] that an instruction calls, with its number of arguments.
fn call(name: &'static str, arguments: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(name, Some(arguments), !0)
}

/// Compiles a template.
///
/// # Errors
/// The engine's error for a template that it cannot parse.
pub(super) fn compile(source: &str) -> Result<Instructions<'static>, Error> {
    let invalid = |why: String| Error::new(ErrorKind::SyntaxError, why);
    if source.len() > TEMPLATE_BYTES_MAX {
        return Err(invalid(format!("has {} bytes, more than {TEMPLATE_BYTES_MAX}", source.len())));
    }
    // Engine and instructions borrow the text. A process opens few models, so it is never freed.
    let lines = source.replace("\r\n", "\n").replace('\r', "\n");
    let source: &'static str = without_constant_products(&without_generation(&lines))?.leak();
    let compile = move || {
        let tree = parse(source, NAME, SyntaxConfig, whitespace())?;
        let mut generator = CodeGenerator::new(NAME, source);
        generator.compile_stmt(&tree);
        bounded(&generator.finish().0, source)
    };
    let compile = move || catch_panic(compile).unwrap_or_else(|why| Err(super::engine_failed(&why)));
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(compile);
    let thread = thread.map_err(|error| invalid(format!("no thread to compile it: {error}")))?;
    thread.join().unwrap_or_else(|_| Err(super::engine_failed("a panic")))
}

fn whitespace() -> WhitespaceConfig {
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true }
}

/// Returns the template with a factor in each product that is no constant: the parser would compute a
/// repeated text, which no bound would count.
///
/// # Errors
/// A tag that is too long.
fn without_constant_products(source: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len());
    let (mut copied, mut tokens) = (0, 0);
    for token in tokenize(source, false, SyntaxConfig, whitespace()) {
        let (token, span) = token?;
        // The parser's time grows with the square of an expression.
        tokens = if matches!(token, Token::VariableStart | Token::BlockStart) { 0 } else { tokens + 1 };
        if tokens > TOKENS_MAX {
            return Err(Error::new(
                ErrorKind::SyntaxError,
                format!("a tag has more than {TOKENS_MAX} words"),
            ));
        }
        if matches!(token, Token::Mul) {
            let end = span.end_offset as usize;
            out += &source[copied..end];
            out += &format!(" {ONE} *");
            copied = end;
        }
    }
    Ok(out + &source[copied..])
}

/// Returns the template with a `with` block in the place of each `generation` block, which marks what the
/// assistant writes. Both have a scope of their own.
fn without_generation(source: &str) -> String {
    let tag = |name: &str| Regex::new(&format!(r"(\{{%[-+]?\s*){name}(\s*[-+]?%\}})"));
    match (tag("generation"), tag("endgeneration")) {
        (Ok(begin), Ok(end)) => {
            end.replace_all(&begin.replace_all(source, "${1}with${2}"), "${1}endwith${2}").into_owned()
        }
        _ => source.to_owned(),
    }
}

/// Returns the instructions with bounded ones in the place of those that call the engine's own operations.
fn bounded(old: &Instructions<'static>, source: &'static str) -> Result<Instructions<'static>, Error> {
    let mut starts: Vec<u32> = Vec::with_capacity(old.len() + 1);
    let mut code: Vec<(Instruction<'static>, u16)> = vec![];
    for index in 0..old.len() as u32 {
        let Some(instruction) = old.get(index) else { break };
        let line = old.get_line(index).unwrap_or_default() as u16;
        starts.push(code.len() as u32);
        code.extend(replaced(instruction)?.into_iter().map(|instruction| (instruction, line)));
    }
    starts.push(code.len() as u32);
    let mut new = Instructions::new(NAME, source);
    for (mut instruction, line) in code {
        match &mut instruction {
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _) => *target = starts[*target as usize],
            _ => {}
        }
        new.add_with_line(instruction, line);
    }
    Ok(new)
}

/// Returns the instructions that take the place of `instruction`.
fn replaced(instruction: &Instruction<'static>) -> Result<Vec<Instruction<'static>>, Error> {
    use Instruction as I;
    let unpacked = || Error::new(ErrorKind::SyntaxError, "arguments are unpacked, which is not supported");
    // The function's name is its last argument.
    let named = |function, name: &'static str, arguments: &Option<u16>| {
        let arguments = arguments.ok_or_else(unpacked)?;
        Ok::<_, Error>(vec![I::LoadConst(Value::from(name)), call(function, arguments + 1)])
    };
    Ok(match instruction {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::Add => vec![call("+", 2)],
        I::Mul => vec![call("*", 2)],
        I::StringConcat => vec![call("~", 2)],
        I::Eq => vec![call("==", 2)],
        I::Ne => vec![call("==", 2), I::Not],
        I::Lt => vec![call("<", 2)],
        I::Gt => vec![I::Swap, call("<", 2)],
        I::Lte => vec![I::Swap, call("<", 2), I::Not],
        I::Gte => vec![call("<", 2), I::Not],
        I::In => vec![call("in", 2)],
        I::CompareAndPreserve(_) => {
            return Err(Error::new(
                ErrorKind::SyntaxError,
                "comparisons are chained, which is not supported",
            ));
        }
        I::CallBlock(_) | I::LoadBlocks | I::Include(_) | I::ExportLocals => {
            return Err(Error::new(ErrorKind::SyntaxError, "blocks and other files are not supported"));
        }
        I::Slice => vec![call("slice", 4)],
        I::GetItem => vec![call("item", 2)],
        I::GetAttr(name) if DICT_METHODS.contains(name) => named("attribute", name, &Some(1))?,
        I::ApplyFilter(name, arguments, _) => named("filter", name, arguments)?,
        I::PerformTest(name, arguments, _) => named("test", name, arguments)?,
        I::CallMethod(name, arguments) => named("method", name, arguments)?,
        I::CallFunction(_, None) | I::CallObject(None) => return Err(unpacked()),
        I::BuildList(_) | I::BuildMap(_) => vec![instruction.clone(), call("nested", 1)],
        I::UnpackList(_) | I::PushLoop(_) => vec![call("iterable", 1), instruction.clone()],
        other => vec![other.clone()],
    })
}

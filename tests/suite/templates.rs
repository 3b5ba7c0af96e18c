//! Chat templates against transformers: ten of our own, and those of a folder that `RLOSS_TEMPLATES` names.

use crate::cli::{in_repository, text_of};
use rloss::chat::template::{ChatTemplate, DATE};
use serde_json::{Map, Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The day that the fixtures were made for.
const DAY: &str = "2026-01-02";

/// Compares every template of a folder with `cases.json.gz`, which `scripts/chat_templates.py reference`
/// wrote. Returns the number of templates, texts and errors.
fn compare(folder: &Path) -> (usize, usize, usize) {
    let mut text = String::new();
    let file = std::fs::File::open(folder.join("cases.json.gz")).unwrap();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    let conversations = cases["conversations"].as_array().unwrap();
    let (mut texts, mut errors, mut wrong) = (0, 0, vec![]);
    let expected = cases["expected"].as_object().unwrap();
    for (name, expected) in expected {
        let source = text_of(folder.join(format!("{name}.jinja")));
        let template = match ChatTemplate::new(&source) {
            Ok(template) => template,
            Err(why) => {
                wrong.push(format!("{name}: {why}"));
                continue;
            }
        };
        for (index, (row, expected)) in conversations.iter().zip(expected.as_array().unwrap()).enumerate() {
            let list = |key: &str| row[key].as_array().cloned().unwrap_or_default();
            let generates = row["add_generation_prompt"] == true;
            let mut variables = row["variables"].as_object().unwrap().clone();
            variables.insert(DATE.into(), DAY.into());
            let found = template.render(&list("messages"), &list("tools"), generates, &variables);
            match (found, expected["text"].as_str()) {
                (Ok(found), Some(text)) if found == text => texts += 1,
                (Err(_), None) => errors += 1,
                (found, _) => wrong.push(format!("{name} {index}: {found:?}\nnot {expected}\n")),
            }
        }
    }
    let shown: Vec<&String> = wrong.iter().take(20).collect();
    assert!(wrong.is_empty(), "{} of {} differ: {shown:#?}", wrong.len(), wrong.len() + texts + errors);
    (expected.len(), texts, errors)
}

#[test]
fn ten_templates_are_rendered_as_transformers_renders_them() {
    let folder = in_repository("tests/fixtures/templates");
    let (templates, texts, errors) = compare(&folder);
    assert_eq!(templates, 10);
    assert!(texts > 900 && errors > 0, "{texts} texts and {errors} errors");
}

#[test]
fn chat_templates_of_a_folder() {
    let Some(folder) = std::env::var_os("RLOSS_TEMPLATES") else {
        let reason =
            "no chat templates (scripts/chat_templates.py reference writes them, then set RLOSS_TEMPLATES)";
        return crate::skips::note(reason, "templates of other models");
    };
    let (templates, texts, errors) = compare(&PathBuf::from(folder));
    println!("{templates} templates: {texts} texts are equal, {errors} errors are errors");
}

/// Each takes too much, or reaches for what no template may have.
#[test]
fn a_hostile_template_is_one_error_within_a_second() {
    let deep = format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000));
    let chain = format!("{{{{ {}1 }}}}", "x + ".repeat(60_000));
    // As deep as a template may be, and harmless.
    let elifs = format!("{{% if a %}}{}{{% endif %}}", "{%elif a%}".repeat(20_000));
    assert_eq!(ChatTemplate::new(&elifs).unwrap().render(&[], &[], true, &Map::new()).unwrap(), "");
    let hostile = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% set ns = namespace(t='ab') %}{% for i in range(90) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t='ab') %}{% for i in range(90) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(90) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(90) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t == ns.t }}",
        "{% set ns = namespace(t=1) %}{% for i in range(99999) %}{% set ns.t = [ns.t] %}{% endfor %}",
        "{% set ns = namespace(t=1) %}{% for i in range(99999) %}{% set ns.t = {'a': ns.t} %}{% endfor %}{{ ns.t | tojson }}",
        "{{ 'a' * 1000000000 }}",
        "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
        "{% for i in range(100000) %}{% set x = 'a' * 100000 %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{% for i in range(100000) %}{{ x | length }}{{ 'b' in x }}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{% for i in range(100000) %}{% if x is endingwith 'b' %}{% endif %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{% for i in range(100000) %}{% set y = x[1:2] %}{% endfor %}",
        "{% set x = 'a' * 9999 %}{{ x | replace('a', x) | replace('a', x) }}",
        "{% set x = 'a' * 9999 %}{{ x.join(x).join(x) }}",
        "{{ 'a\\n' * 999999 | indent(1000000) }}",
        "{% set x = range(100000) | list %}{% for i in range(100000) %}{% if x == x %}{% endif %}{% endfor %}",
        "{% set x = range(100000) | list %}{% for i in range(100000) %}{% set y = x | sort %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x | map('string') %}{% endfor %}{{ ns.x | list }}{{ 1 + 'a' }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns | tojson }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('id') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('id') }}",
        "{% set x = messages.append(1) %}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ 10 ** 10 ** 10 }}",
        &deep,
        &chain,
        &"{{ 'a' }}".repeat(40_000),
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ ",
    ];
    let messages = [json!({"role": "user", "content": "?"})];
    for source in hostile {
        let shown = &source[..source.len().min(90)];
        let start = Instant::now();
        let result =
            ChatTemplate::new(source).and_then(|template| template.render(&messages, &[], true, &Map::new()));
        let took = start.elapsed();
        let why = result.map(|text| text.len()).expect_err(shown);
        assert!(!why.is_empty() && why.len() < 300, "{shown}: {why}");
        assert!(took < Duration::from_secs(5), "{shown}: {took:?}");
        println!("{took:9.1?} {shown}: {why}");
    }
}

//! A real GGUF file beside its Hugging Face folder, transformers' tokenizer and llama.cpp.

use crate::cli::text_of;
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::chat::Chat;
use rloss::checkpoint::gguf::GgufModel;
use rloss::checkpoint::load::ModelFolder;
use rloss::model::attention::PackedAttention;
use rloss::model::config::Config;
use rloss::model::decoder_stack::DecoderStack;
use rloss::model::forward::{ForwardOptions, Model, Rows};
use rloss::model::names::parameter_specs;
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::storage::TensorStorage;
use rloss::ops::cpu::host_values;
use rloss::ops::logits::SamplingParameters;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Positions that a forward pass scores at a time; their logits take 150 thousand values each.
const CONTEXT: usize = 1024;
/// Largest difference of our two best logits where llama.cpp may prefer another token: it rounds activations
/// to 8 bits.
const NEAR: f32 = 0.25;

struct Opened {
    config: Config,
    files: ModelFolder,
    chat: Chat,
}

impl Opened {
    fn gguf(path: &Path) -> Self {
        let GgufModel { weights, config, vocabulary, .. } = GgufModel::open(path).unwrap();
        let chat = config.family.chat.from_vocabulary(vocabulary, "model.gguf").unwrap();
        Self { files: ModelFolder::from_gguf(path, weights), config, chat }
    }

    fn folder(path: &Path) -> Self {
        let config = Config::read(path).unwrap();
        let chat = config.family.chat.read(&path.join("tokenizer.json")).unwrap();
        Self { files: ModelFolder::open(path, &config).unwrap(), config, chat }
    }

    fn parameters(&self) -> Parameters {
        let tensors = parameter_specs(&self.config).into_iter().map(|spec| {
            let stored = match self.files.read_packed(&spec, self.files.format_of(&spec))? {
                Some(packed) => TensorStorage::from_weight(packed),
                None => TensorStorage::variable(&spec, self.files.read_values(&spec)?)?,
            };
            Ok((spec, stored))
        });
        Parameters::load(&self.config, &Backend::default(), tensors).unwrap()
    }
}

/// The logits of every token of `tokens`, `[T][V]`.
fn logits(config: &Config, parameters: &Parameters, tokens: &[u32]) -> Vec<Vec<f32>> {
    let model = Model::new(config.clone(), CONTEXT);
    let weights = parameters.frozen_weights(None).unwrap();
    let sequence = Sequence { tokens: tokens.to_vec(), mask: vec![true; tokens.len()], kept_tokens: vec![] };
    let batch = MicroBatch::split(&[sequence], usize::MAX).remove(0);
    let stack = DecoderStack { model: &model, weights: &weights, forward: ForwardOptions::default() };
    let rows = &mut Rows {
        rotation: model.rotation(batch.positions.clone()),
        attention: &mut PackedAttention { sequence_rows: batch.sequence_rows.clone() },
        replay: None,
    };
    let hidden = stack.forward(&Arc::new(batch.tokens.to_vec()), rows, &mut |_, _, _| Ok(())).unwrap();
    let all = Arc::new((0..batch.tokens.len() as u32).collect());
    let normed = stack.final_norm_rows(&hidden, &all).unwrap();
    let logits = stack.weights.logits(&normed, &SamplingParameters::with_temperature(1.0)).unwrap();
    host_values(logits.scaled_logits()).unwrap().chunks(config.vocab_size).map(<[f32]>::to_vec).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = text_of(path);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn a_real_file_agrees_with_its_folder_its_tokenizer_and_llama_cpp() {
    let Some(made) = std::env::var_os("RLOSS_GGUF_PARITY") else {
        return crate::skips::note(
            "no RLOSS_GGUF_PARITY (scripts/llama_cpp.py file makes it and sets it)",
            "",
        );
    };
    let made = Path::new(&made);
    let [file, tied] = ["model.gguf", "tied.gguf"].map(|name| Opened::gguf(&made.join(name)));
    let folder = Opened::folder(&made.join("folder"));
    // The folder has the file's head in the embedding's place, and so has `tied.gguf`.
    let mut compared = 0;
    for (opened, is_same) in [(&file, false), (&tied, true)] {
        let specs = parameter_specs(&folder.config);
        for spec in specs.iter().filter(|spec| is_same || !spec.name.contains("embed_tokens")) {
            let [ours, theirs] = [opened, &folder].map(|one| bits(&one.files.read_values(spec).unwrap()));
            assert!(ours == theirs, "{}", spec.name);
            compared += 1;
        }
    }
    let texts = lines(&made.join("texts.jsonl"));
    for row in &texts {
        let text = row["text"].as_str().unwrap();
        for opened in [&file, &folder] {
            assert_eq!(opened.chat.vocabulary().encode_text(text).unwrap(), ids(&row["ids"]), "{text:?}");
        }
    }
    let [ours, tied_weights, theirs] = [&file, &tied, &folder].map(Opened::parameters);
    let (mut positions, mut others, mut widest) = (0, 0, 0.0f32);
    for (index, row) in lines(&made.join("answers.jsonl")).iter().enumerate() {
        let (prompt, answer) = (ids(&row["prompt"]), ids(&row["answer"]));
        let tokens = [&prompt[..], &answer].concat();
        if index < 4 {
            let [a, b] = [(&tied, &tied_weights), (&folder, &theirs)]
                .map(|(opened, weights)| logits(&opened.config, weights, &tokens));
            assert!(a.concat().iter().map(|z| z.to_bits()).eq(b.concat().iter().map(|z| z.to_bits())));
        }
        let found = logits(&file.config, &ours, &tokens);
        for (at, &token) in answer.iter().enumerate() {
            let row = &found[prompt.len() + at - 1];
            let best = row.iter().copied().fold(f32::MIN, f32::max);
            positions += 1;
            if row[token as usize] < best {
                others += 1;
                let second = row.iter().copied().filter(|&z| z < best).fold(f32::MIN, f32::max);
                widest = widest.max(best - second);
            }
        }
    }
    println!(
        "{compared} tensors and {} texts equal; of {positions} positions llama.cpp prefers another token at {others}, where \
         our two best logits lie within {widest}",
        texts.len()
    );
    assert!(widest <= NEAR, "{widest}");
}

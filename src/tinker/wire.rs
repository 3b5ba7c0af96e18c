//! The messages of the Tinker API in protobuf, written from what its public SDK sends and reads. A field that
//! is not here is ignored.

use prost::{Message, decode_length_delimiter};
use std::collections::BTreeMap;

/// The values of `Tensor::dtype`.
pub const F32: i32 = 1;
pub const I64: i32 = 2;
pub const I32: i32 = 3;

/// Maximum number of messages in a request: datums with their inputs and chunks. A message can be a hundred
/// times as large in memory as on the wire.
const MESSAGES_MAX: usize = 1 << 16;

#[derive(Clone, PartialEq, Message)]
pub struct ForwardBackwardRequest {
    #[prost(string, tag = "1")]
    pub model_id: String,
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
    #[prost(message, repeated, tag = "3")]
    pub data: Vec<Datum>,
    #[prost(string, tag = "4")]
    pub loss_fn: String,
    #[prost(btree_map = "string, double", tag = "5")]
    pub loss_fn_config: BTreeMap<String, f64>,
    #[prost(bool, tag = "6")]
    pub forward_only: bool,
    #[prost(btree_map = "string, message", tag = "7")]
    pub loss_fn_config_v2: BTreeMap<String, ConfigValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ConfigValue {
    #[prost(double, optional, tag = "1")]
    pub number: Option<f64>,
    #[prost(string, optional, tag = "2")]
    pub text: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Datum {
    #[prost(message, repeated, tag = "1")]
    pub model_input: Vec<Chunk>,
    #[prost(btree_map = "string, message", tag = "2")]
    pub loss_fn_inputs: BTreeMap<String, Tensor>,
}

/// A part of an input. Images and audio have no `encoded_text`.
#[derive(Clone, PartialEq, Message)]
pub struct Chunk {
    #[prost(message, optional, tag = "1")]
    pub encoded_text: Option<EncodedText>,
}

#[derive(Clone, PartialEq, Message)]
pub struct EncodedText {
    /// Token ids, int32.
    #[prost(bytes = "vec", tag = "1")]
    pub tokens: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    #[prost(bytes = "vec", optional, tag = "1")]
    pub dense: Option<Vec<u8>>,
    #[prost(message, optional, tag = "2")]
    pub sparse_csr: Option<SparseCsr>,
    #[prost(int32, tag = "3")]
    pub dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    pub shape: Vec<i64>,
}

/// A sparse matrix in compressed rows. The indices are int64.
#[derive(Clone, PartialEq, Message)]
pub struct SparseCsr {
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub crow_indices: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub col_indices: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ForwardBackwardOutput {
    #[prost(string, tag = "1")]
    pub loss_fn_output_type: String,
    #[prost(message, repeated, tag = "2")]
    pub loss_fn_outputs: Vec<ArrayRecord>,
    #[prost(btree_map = "string, double", tag = "3")]
    pub metrics: BTreeMap<String, f64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ArrayRecord {
    #[prost(string, tag = "1")]
    pub type_tag: String,
    #[prost(btree_map = "string, message", tag = "2")]
    pub fields: BTreeMap<String, BatchedTensor>,
    #[prost(int64, tag = "3")]
    pub num_datums: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct BatchedTensor {
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
    /// The byte offset of each datum in `data` and its length, int64.
    #[prost(bytes = "vec", tag = "2")]
    pub offsets: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub dtype: i32,
    #[prost(int64, repeated, tag = "4")]
    pub trailing_shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SampleResponse {
    #[prost(message, repeated, tag = "1")]
    pub sequences: Vec<SampledSequence>,
    /// f32; NaN for the first token.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub prompt_logprobs: Option<Vec<u8>>,
    #[prost(message, optional, tag = "3")]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SampledSequence {
    /// 0 stop, 1 length.
    #[prost(int32, tag = "1")]
    pub stop_reason: i32,
    /// int32.
    #[prost(bytes = "vec", tag = "2")]
    pub tokens: Vec<u8>,
    /// f32.
    #[prost(bytes = "vec", tag = "3")]
    pub logprobs: Vec<u8>,
    #[prost(message, optional, tag = "4")]
    pub topk: Option<TopkLogprobs>,
}

/// Rows of the likeliest tokens. An empty cell is token 0 with log-prob −99999.
#[derive(Clone, PartialEq, Message)]
pub struct TopkLogprobs {
    /// int32 `[length, k]`.
    #[prost(bytes = "vec", tag = "1")]
    pub token_ids: Vec<u8>,
    /// f32 `[length, k]`.
    #[prost(bytes = "vec", tag = "2")]
    pub logprobs: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub k: i32,
    #[prost(int32, tag = "4")]
    pub length: i32,
}

/// Decodes a request. Its messages are counted first, so that it takes little more memory than its bytes.
///
/// # Errors
/// When `body` is not such a request, or has too many messages.
pub fn decode_request(body: &[u8]) -> Result<ForwardBackwardRequest, String> {
    let broken = || "the body is not a forward_backward request in protobuf".to_owned();
    let mut messages = 0;
    for (tag, datum) in Fields(body) {
        messages += 1 + if tag == 3 { Fields(datum).count() } else { 0 };
        if messages > MESSAGES_MAX {
            return Err(format!(
                "the request has more than {MESSAGES_MAX} datums, chunks and inputs; send fewer at a time"
            ));
        }
    }
    ForwardBackwardRequest::decode(body).map_err(|error| format!("{}: {error}", broken()))
}

/// The fields of a message: tag and bytes; no bytes for a number. Ends at the first broken field.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = (usize, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let key = decode_length_delimiter(&mut self.0).ok()?;
        let length = match key & 7 {
            0 => decode_length_delimiter(&mut self.0).map(|_| 0).ok()?,
            1 => 8,
            2 => decode_length_delimiter(&mut self.0).ok()?,
            5 => 4,
            _ => return None,
        };
        let (field, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some((key >> 3, field))
    }
}

/// Returns the numbers in `bytes`; `None` if their length is not a multiple of `N`.
pub fn numbers<const N: usize, T>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    rest.is_empty().then(|| chunks.iter().map(|bytes| number(*bytes)).collect())
}

/// Returns the bytes of `values`.
pub fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Returns token ids as bytes.
pub fn token_bytes(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
    tokens.into_iter().flat_map(|token| (token as i32).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_it_was_and_broken_bytes_are_an_error() {
        let tensor =
            Tensor { dense: Some(vec![1, 2, 3, 4]), dtype: F32, shape: vec![1], ..Tensor::default() };
        let chunk = Chunk { encoded_text: Some(EncodedText { tokens: vec![5, 0, 0, 0] }) };
        let datum = Datum {
            model_input: vec![chunk],
            loss_fn_inputs: BTreeMap::from([("weights".to_owned(), tensor)]),
        };
        let request = ForwardBackwardRequest {
            model_id: "a:train:0".to_owned(),
            seq_id: 3,
            data: vec![datum; 2],
            ..ForwardBackwardRequest::default()
        };
        let body = request.encode_to_vec();
        assert_eq!(decode_request(&body).unwrap(), request);
        for end in 1..body.len() {
            // A body that ends early is an error, or a shorter request.
            let _ = decode_request(&body[..end]);
        }
        assert!(decode_request(&[0xff; 40]).unwrap_err().contains("protobuf"));
        // Two million datums of two bytes.
        let many = [0x1a, 0x00].repeat(2 << 20);
        assert!(decode_request(&many).unwrap_err().contains("send fewer"));
    }
}

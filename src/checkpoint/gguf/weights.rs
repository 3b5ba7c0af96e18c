//! The weights of a GGUF file. Blocks, MXFP4 experts and BF16 matrices stay packed in memory. All other
//! tensors are decoded to f32. All values are exactly those of the file.

use super::file::{GgufFile, GgufTensor, MetadataValue};
use super::names::{GgufTensorSpec, geometry, parts};
use super::tensor_type::{MXFP4_BYTES, TensorType, from_gguf_block};
use crate::bad_input;
use crate::model::config::Config;
use crate::model::families::Family;
use crate::model::names::{Layout, ParameterSpec, parameter_specs};
use crate::model::storage::StoredFormat;
use crate::ops::buffer::{buffer, byte_buffer};
use crate::ops::mxfp4::BLOCK;
use crate::ops::packed_weights::{PackedFormat, PackedMatrix, StoredRows, block_is_finite};
use crate::ops::weight::Weight;
use anyhow::Result;
use multiversion::multiversion;
use rayon::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of mistakes that one error lists.
const MISTAKES_SHOWN_MAX: usize = 16;
/// Maximum number of files of a split model.
const FILES_MAX: i128 = 1000;
/// Part of the name of the first file of a split model.
const FIRST_OF_SPLIT: &str = "-00001-of-";
/// Number of values that are decoded at a time. A row is never split, so a longer row exceeds this number.
/// The allocator reuses buffers of this size. It requests larger buffers from the system each time, and the
/// system fills them with zeros.
const DECODED_VALUES: usize = 16 * 1024;
/// Number of rows that are transposed at a time. This many values of a column are then written side by side.
const TRANSPOSED_ROWS: usize = 64;

/// The open files of a GGUF model, one or several.
pub struct GgufWeights {
    path: PathBuf,
    files: Vec<GgufFile>,
    pub(super) family: Family,
}

impl GgufWeights {
    /// Opens the model in the file `path`. If the model is split, also opens its other files. Returns the
    /// weights and the metadata of the first file.
    ///
    /// # Errors
    /// Those of [`GgufFile::open`], and [`crate::error::BadInput`] when a file of a split model is absent.
    pub fn open(path: &Path) -> Result<(Self, HashMap<String, MetadataValue>)> {
        let mut first = GgufFile::open(path)?;
        let metadata = std::mem::take(&mut first.metadata);
        let mut files = vec![first];
        for other in other_files(path, &metadata)? {
            let file = GgufFile::open(&other)?;
            let seen = |name: &&String| files.iter().any(|file: &GgufFile| file.tensors.contains_key(*name));
            if let Some(name) = file.tensors.keys().find(seen) {
                return Err(bad_input!(
                    "{}: `{name}` is in an earlier file too; fetch the files again",
                    other.display()
                ));
            }
            files.push(file);
        }
        Ok((Self { path: path.to_owned(), files, family: Family::default() }, metadata))
    }

    /// Returns a tensor and its file.
    pub(super) fn find(&self, name: &str) -> Option<(&GgufFile, &GgufTensor)> {
        self.files.iter().find_map(|file| Some((file, file.tensors.get(name)?)))
    }

    /// Checks names, shapes and types against `config`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] lists all mistakes.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        let mut extra: BTreeSet<&str> =
            self.files.iter().flat_map(|file| file.tensors.keys()).map(String::as_str).collect();
        let mut mistakes = vec![];
        for spec in parameter_specs(config) {
            for GgufTensorSpec { name, shape } in parts(&spec, self.family) {
                extra.remove(name.as_str());
                match self.find(&name) {
                    None => mistakes.push(format!("`{name}` is missing")),
                    Some((_, found)) if found.shape != shape => mistakes.push(format!(
                        "`{name}` has shape {:?}, the metadata implies {shape:?}",
                        found.shape
                    )),
                    Some((_, found)) if !spec.is_matrix() && found.dtype.block > 1 => mistakes
                        .push(format!("`{name}` is {}; a vector must be F32, F16 or BF16", found.dtype.name)),
                    Some(_) => {}
                }
            }
        }
        mistakes.extend(extra.into_iter().map(|name| format!("{name:?} is not a tensor of this model")));
        if mistakes.is_empty() {
            return Ok(());
        }
        let more = mistakes.len().saturating_sub(MISTAKES_SHOWN_MAX);
        mistakes.truncate(MISTAKES_SHOWN_MAX);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Err(bad_input!(
            "{}: the weights do not fit the metadata: {}{more}; fetch or convert the file again",
            self.path.display(),
            mistakes.join("; ")
        ))
    }

    /// Returns the format of a parameter. A parameter of several tensors with different types is read as f32.
    pub fn format_of(&self, spec: &ParameterSpec) -> StoredFormat {
        let parts = parts(spec, self.family);
        let types: Vec<_> = parts.iter().filter_map(|part| Some(self.find(&part.name)?.1.dtype)).collect();
        let all = |is: &dyn Fn(&TensorType) -> bool| !types.is_empty() && types.iter().all(|of| is(of));
        let packed = types.first().and_then(|of| of.packed);
        match packed {
            Some(kind) if all(&|of| of.packed == packed) => StoredFormat::Blocks(kind),
            _ if spec.is_expert_matrix() && all(&|of| *of == TensorType::MXFP4) => StoredFormat::Mxfp4,
            _ if all(&|of| [TensorType::BF16, TensorType::MXFP4].contains(of)) => StoredFormat::Bf16,
            _ => StoredFormat::F32,
        }
    }

    /// Reads one parameter in packed format; `None` when it is held as f32. `format` is that of
    /// [`Self::format_of`], or bf16 for blocks, which are then rounded.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a value is NaN or infinite, or the file cannot be read.
    pub fn read_packed(&self, spec: &ParameterSpec, format: StoredFormat) -> Result<Option<Weight>> {
        let (Some(format), Some(shape)) = (spec.packed_format(format), spec.matrix_shape()) else {
            return Ok(None);
        };
        let [_, output, input] = geometry(spec);
        let matrix = match format {
            PackedFormat::Bf16Rows => {
                let mut bytes = byte_buffer(format.bytes(shape));
                let rows = (DECODED_VALUES / input).max(1);
                bytes.par_chunks_mut(2 * rows * input).enumerate().try_for_each(|(index, to)| {
                    let first = index * rows;
                    self.read_bf16(spec, 0, first..(first + rows).min(output), to)
                })?;
                PackedMatrix::from_bytes(format, shape, bytes)
            }
            PackedFormat::Bf16 => PackedMatrix::read(format, shape, |rows: StoredRows| {
                self.read_bf16(spec, rows.expert, rows.columns, rows.values)
            })?,
            PackedFormat::Mxfp4 => PackedMatrix::read(format, shape, |rows: StoredRows| {
                self.read_blocks(spec, rows.expert, rows.columns, |place, block| {
                    let (bytes, scale) = from_gguf_block(block);
                    if !block_is_finite(&bytes, scale) {
                        return Err(self.not_finite(spec));
                    }
                    rows.values[place * (BLOCK / 2)..][..BLOCK / 2].copy_from_slice(&bytes);
                    rows.scales[place] = scale;
                    Ok(())
                })
            })?,
            PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) => {
                let width = kind.stored_bytes(input);
                PackedMatrix::read(format, shape, |rows: StoredRows| {
                    self.read(spec, rows.expert, rows.columns, |_, bytes, step, first| {
                        if !kind.is_finite(bytes) {
                            return Err(self.not_finite(spec));
                        }
                        for (row, bytes) in bytes.chunks_exact(width).enumerate() {
                            rows.values[(first + row * step) * width..][..width].copy_from_slice(bytes);
                        }
                        Ok(())
                    })
                })?
            }
        };
        Ok(Some(Weight::Packed(Arc::new(matrix))))
    }

    /// Reads one parameter as f32 in its working layout.
    ///
    /// # Errors
    /// As [`Self::read_packed`].
    pub fn read_values(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        let [experts, output, input] = geometry(spec);
        let is_transposed = spec.layout == Layout::Transposed || spec.is_expert_matrix();
        let mut values = vec![0.0; spec.element_count()];
        let mut block = vec![0.0; if is_transposed { TRANSPOSED_ROWS * input } else { 0 }];
        for (expert, values) in values.chunks_exact_mut((output * input).max(1)).enumerate().take(experts) {
            if !is_transposed {
                self.decode_rows(spec, expert, 0..output, |row, decoded| {
                    values[row * input..][..input].copy_from_slice(decoded);
                    is_finite(decoded)
                })?;
                continue;
            }
            for first in (0..output).step_by(TRANSPOSED_ROWS) {
                let rows = first..(first + TRANSPOSED_ROWS).min(output);
                self.decode_rows(spec, expert, rows.clone(), |row, decoded| {
                    block[row * input..][..input].copy_from_slice(decoded);
                    is_finite(decoded)
                })?;
                for (i, to) in values.chunks_exact_mut(output).enumerate() {
                    let column = block[i..].iter().step_by(input);
                    to[rows.clone()].iter_mut().zip(column).for_each(|(to, value)| *to = *value);
                }
            }
        }
        Ok(values)
    }

    /// Decodes the rows `rows` of one expert. The parameter has the shape `[experts, out, in]`. For each row,
    /// `put` receives its index within `rows` and its values, and returns whether they are finite.
    fn decode_rows(
        &self,
        spec: &ParameterSpec,
        expert: usize,
        rows: Range<usize>,
        mut put: impl FnMut(usize, &[f32]) -> bool,
    ) -> Result<()> {
        let [_, _, input] = geometry(spec);
        let mut buffer = buffer(DECODED_VALUES.max(input).min(rows.len() * input));
        self.read(spec, expert, rows, |dtype, bytes, step, first| {
            let decoded = &mut buffer[..bytes.len() / dtype.bytes * dtype.block];
            dtype.decode(bytes, decoded);
            let mut rows = decoded.chunks_exact(input).enumerate();
            let is_finite = rows.all(|(row, values)| put(first + row * step, values));
            if is_finite { Ok(()) } else { Err(self.not_finite(spec)) }
        })
    }

    /// Fills `to` with the rows `rows` of one expert as bf16, `[rows][in]`.
    fn read_bf16(
        &self,
        spec: &ParameterSpec,
        expert: usize,
        rows: Range<usize>,
        to: &mut [u8],
    ) -> Result<()> {
        let [_, _, input] = geometry(spec);
        self.decode_rows(spec, expert, rows, |row, values| {
            write_bf16(&mut to[2 * row * input..][..2 * input], values)
        })
    }

    /// Passes each MXFP4 block of the rows `rows` of one expert to `put`. `put` also receives the index of
    /// the block among all blocks of `rows`.
    fn read_blocks(
        &self,
        spec: &ParameterSpec,
        expert: usize,
        rows: Range<usize>,
        mut put: impl FnMut(usize, &[u8; MXFP4_BYTES]) -> Result<()>,
    ) -> Result<()> {
        let blocks = geometry(spec)[2] / BLOCK;
        self.read(spec, expert, rows, |_, bytes, step, first| {
            bytes.as_chunks().0.iter().enumerate().try_for_each(|(index, block)| {
                put((first + index / blocks * step) * blocks + index % blocks, block)
            })
        })
    }

    /// Reads the rows `rows` of one expert, one GGUF tensor after the other, a few rows at a time. `take`
    /// receives the type and the bytes of these few rows. It also receives the step from one of these rows to
    /// the next in the parameter, and the index of the first one within `rows`.
    fn read(
        &self,
        spec: &ParameterSpec,
        expert: usize,
        rows: Range<usize>,
        mut take: impl FnMut(&TensorType, &[u8], usize, usize) -> Result<()>,
    ) -> Result<()> {
        let [_, output, input] = geometry(spec);
        let parts = parts(spec, self.family);
        let step = parts.len();
        for (offset, part) in parts.iter().enumerate() {
            let (file, tensor) = self
                .find(&part.name)
                .ok_or_else(|| bad_input!("{}: `{}` is missing", self.path.display(), part.name))?;
            // Row r of the part is row r · step + offset of the parameter.
            let own = |row: usize| (row + step - 1 - offset) / step;
            let (start, end) = (own(rows.start), own(rows.end));
            let count = (DECODED_VALUES / input).max(1);
            let mut bytes = byte_buffer(tensor.dtype.bytes_of(count.min(end - start) * input));
            for first in (start..end).step_by(count) {
                let place = tensor.dtype.bytes_of((expert * (output / step) + first) * input);
                let bytes = &mut bytes[..tensor.dtype.bytes_of(count.min(end - first) * input)];
                file.read_at(tensor, place, bytes)?;
                take(tensor.dtype, bytes, step, first * step + offset - rows.start)?;
            }
        }
        Ok(())
    }

    fn not_finite(&self, spec: &ParameterSpec) -> anyhow::Error {
        bad_input!(
            "{}: `{}` holds NaN or an infinite value: the file is damaged; fetch or convert it again",
            self.path.display(),
            parts(spec, self.family).iter().map(|part| &*part.name).collect::<Vec<_>>().join("` or `"),
        )
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn is_finite(values: &[f32]) -> bool {
    // Vector instructions compute this maximum of all exponents. `all` would test value by value.
    values.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff)) < f32::INFINITY.to_bits()
}

/// Writes values as the nearest bf16, ties to even. Returns whether every bf16 is finite.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn write_bf16(to: &mut [u8], values: &[f32]) -> bool {
    // The least magnitude that is rounded to infinity.
    const OVERFLOW: u32 = 0x7f7f_8000;
    let mut largest = 0;
    for (to, value) in to.as_chunks_mut().0.iter_mut().zip(values) {
        let bits = value.to_bits();
        *to = ((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes();
        largest = largest.max(bits & 0x7fff_ffff);
    }
    largest < OVERFLOW
}

/// Returns all files of the model in `path`.
///
/// # Errors
/// As [`GgufWeights::open`].
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    // The name tells whether the model is split. Reading a header takes tens of milliseconds.
    if !path.file_name().is_some_and(|name| name.to_string_lossy().contains(FIRST_OF_SPLIT)) {
        return Ok(vec![path.to_owned()]);
    }
    let others = other_files(path, &GgufFile::open(path)?.metadata)?;
    Ok(std::iter::once(path.to_owned()).chain(others).collect())
}

/// Returns the other files of a split model. `path` must be the first one.
fn other_files(path: &Path, metadata: &HashMap<String, MetadataValue>) -> Result<Vec<PathBuf>> {
    let number = |key: &str| if let Some(MetadataValue::Integer(n)) = metadata.get(key) { *n } else { 0 };
    let count = number("split.count");
    if count <= 1 {
        return Ok(vec![]);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(&format!("{FIRST_OF_SPLIT}{count:05}.gguf")).filter(|_| count <= FILES_MAX);
    let (Some(stem), 0) = (stem, number("split.no")) else {
        return Err(bad_input!(
            "{}: is one of {count} files; name the first, …-00001-of-{count:05}.gguf, with the others beside it",
            path.display()
        ));
    };
    Ok((2..=count)
        .map(|index| path.with_file_name(format!("{stem}-{index:05}-of-{count:05}.gguf")))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn bf16_is_rounded_to_even_and_what_is_not_finite_is_found() {
        for bits in [0, 0x8000_0000, 0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0xbf80_7fff, 1, 0x7f7f_7fff] {
            let mut to = [0; 2];
            assert!(write_bf16(&mut to, &[f32::from_bits(bits)]), "{bits:x}");
            assert_eq!(bf16::from_le_bytes(to), bf16::from_f32(f32::from_bits(bits)), "{bits:x}");
        }
        for bits in [0x7f7f_8000, 0xff7f_ffff, 0x7f80_0000, 0x7fc0_0000, 0xffff_ffff] {
            let mut values = [0.5; 37];
            values[35] = f32::from_bits(bits);
            assert!(!write_bf16(&mut [0; 74], &values), "{bits:x}");
        }
    }
}

//! A tensor as a model holds it: plain f32 values, which may learn, or packed ones, which do not.

use super::config::Form;
use super::layer::{Adapter, Projection};
use super::names::{Layout, ParameterSpec, TensorRole};
use crate::dist::{Mesh, piece};
use crate::ops::cpu::on_host;
use crate::ops::packed::{self, PackedForm, PackedMatrix, PackedTable};
use crate::ops::{self, Parameter};
use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A tensor without gradients, packed or not.
#[derive(Clone)]
pub enum Held {
    Plain(Tensor),
    Matrix(Arc<PackedMatrix>),
    /// Rows that are looked up: the embedding.
    Table(Arc<PackedTable>),
}

/// This rank's bytes of a packed tensor that all ranks hold together.
#[derive(Clone)]
pub struct PackedPiece {
    whole: PackedShape,
    bytes: Arc<Vec<u8>>,
}

/// What its bytes are arranged as.
#[derive(Clone, Copy)]
enum PackedShape {
    Matrix(PackedForm, [usize; 3]),
    /// Rows and their width.
    Table(usize, usize),
}

impl PackedPiece {
    /// This rank's bytes of `held`, tensor `index`; `None` for what is not packed, or lies on a device.
    fn of(held: &Held, mesh: &Mesh, index: usize) -> Option<Self> {
        let (whole, bytes) = match held {
            Held::Plain(_) => return None,
            Held::Matrix(matrix) => {
                (PackedShape::Matrix(matrix.form(), matrix.shape()), matrix.bytes().ok()?)
            }
            Held::Table(table) => {
                let (rows, width) = table.shape();
                (PackedShape::Table(rows, width), table.bytes())
            }
        };
        let own = piece(bytes.len(), index, mesh.rank(), mesh.ranks());
        Some(Self { whole, bytes: Arc::new(bytes[own].to_vec()) })
    }

    /// What is here.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of the whole tensor.
    pub fn whole_bytes(&self) -> usize {
        match self.whole {
            PackedShape::Matrix(form, shape) => form.bytes(shape),
            PackedShape::Table(rows, width) => 2 * rows * width,
        }
    }

    /// So many experts of it, whose bytes these are.
    pub fn made_of_experts(&self, experts: usize, bytes: Vec<u8>) -> Held {
        match self.whole {
            PackedShape::Matrix(form, [_, input, output]) => {
                Held::Matrix(Arc::new(PackedMatrix::of_bytes(form, [experts, input, output], bytes)))
            }
            PackedShape::Table(..) => self.made_whole(bytes),
        }
    }

    /// The whole tensor, whose bytes these are.
    pub fn made_whole(&self, bytes: Vec<u8>) -> Held {
        match self.whole {
            PackedShape::Matrix(form, shape) => {
                Held::Matrix(Arc::new(PackedMatrix::of_bytes(form, shape, bytes)))
            }
            PackedShape::Table(_, width) => Held::Table(Arc::new(PackedTable::new(bytes, width))),
        }
    }
}

/// A tensor on its way into a model: values that may learn, or what is shared as it is.
pub enum Loaded {
    Values(Vec<f32>),
    Packed(Held),
    /// This rank's piece of packed values.
    PackedPiece(Arc<Mesh>, PackedPiece),
    /// This rank's piece of values that the ranks of a mesh share.
    Piece(Arc<Mesh>, Vec<f32>),
    /// So many bytes that stay on disk.
    Stored(u64),
}

impl Loaded {
    /// The values of `spec`, which are in memory.
    ///
    /// # Errors
    /// When they are not.
    pub fn held(self, spec: &ParameterSpec) -> Result<Held> {
        match self {
            Loaded::Values(values) => {
                Ok(Held::Plain(Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?))
            }
            Loaded::Packed(held) => Ok(held),
            Loaded::Piece(..) | Loaded::PackedPiece(..) => bail!("{} is in pieces", spec.name),
            Loaded::Stored(_) => bail!("{} is on disk", spec.name),
        }
    }

    /// Of values that are all here, only what this rank holds of tensor `index`, where there are several.
    pub fn cut(self, mesh: &Arc<Mesh>, index: usize) -> Self {
        match self {
            Loaded::Values(values) if mesh.ranks() > 1 => {
                let piece = piece(values.len(), index, mesh.rank(), mesh.ranks());
                Loaded::Piece(mesh.clone(), values[piece].to_vec())
            }
            Loaded::Packed(held) if mesh.ranks() > 1 => match PackedPiece::of(&held, mesh, index) {
                Some(piece) => Loaded::PackedPiece(mesh.clone(), piece),
                None => Loaded::Packed(held),
            },
            whole => whole,
        }
    }
}

/// A tensor as a layer is made of it.
#[derive(Clone)]
pub enum Weight {
    Plain(Parameter),
    Matrix(Arc<PackedMatrix>),
    Table(Arc<PackedTable>),
    /// A matrix with an adapter beside it.
    Adapted(Box<Weight>, Adapter),
}

/// What token ids are looked up in.
#[derive(Clone)]
pub enum Embedding {
    /// `[V, H]`.
    Plain(Parameter),
    /// `[V, H]`.
    Packed(Arc<PackedTable>),
    /// The head, `[H, V]`, whose columns are looked up.
    Tied(Projection),
}

impl ParameterSpec {
    /// How the tensor is packed where it lies on disk in `form` and does not learn; `None` for what stays f32.
    pub fn packed_form(&self, form: Form) -> Option<packed::PackedForm> {
        let is_packable = self.is_matrix() && self.role != TensorRole::AdapterFactor;
        // A single column is multiplied another way.
        let wide = self.working_shape().last().is_some_and(|&columns| columns > 1);
        match form {
            Form::F32 => None,
            Form::Mxfp4 if self.is_expert_matrix() => Some(packed::PackedForm::Mxfp4),
            _ => (is_packable && wide).then_some(packed::PackedForm::Bf16),
        }
    }

    /// Whether rows are looked up and nothing multiplies by it: an embedding that is not the head too.
    pub fn is_table(&self) -> bool {
        self.role == TensorRole::Embedding && self.layout == Layout::AsStored
    }

    /// `[E, in, out]` of a matrix, with one "expert" where it has none.
    pub fn matrix_shape(&self) -> Option<[usize; 3]> {
        match *self.working_shape() {
            [input, output] => Some([1, input, output]),
            [experts, input, output] => Some([experts, input, output]),
            _ => None,
        }
    }

    /// Bytes of the tensor in memory where it lies on disk in `form` and does not learn.
    pub fn resident_bytes(&self, form: Form) -> u64 {
        let plain = self.element_count() as u64 * size_of::<f32>() as u64;
        match (self.packed_form(form), self.matrix_shape()) {
            // Rows that are only looked up are not arranged in panels.
            (Some(_), _) if self.is_table() => plain / 2,
            (Some(form), Some(shape)) => form.bytes(shape) as u64,
            _ => plain,
        }
    }
}

impl Held {
    /// Its size in memory, bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Held::Plain(values) => (values.elem_count() * values.dtype().size_in_bytes()) as u64,
            Held::Matrix(matrix) => matrix.size_bytes() as u64,
            Held::Table(table) => table.size_bytes() as u64,
        }
    }

    /// Some experts of a tensor that has one of each.
    ///
    /// # Errors
    /// When it has none.
    pub fn experts(&self, experts: Range<usize>) -> Result<Self> {
        Ok(match self {
            Held::Plain(values) => Held::Plain(values.narrow(0, experts.start, experts.len())?),
            Held::Matrix(matrix) => Held::Matrix(Arc::new(matrix.experts(experts)?)),
            Held::Table(_) => bail!("a table has no experts"),
        })
    }

    /// The same on `device`, where matrices are MXFP4 as they were, or bf16, and all else is f32.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn on(&self, device: &Device, spec: &ParameterSpec) -> Result<Self> {
        let dtype = if spec.is_matrix() { DType::BF16 } else { DType::F32 };
        Ok(match self {
            Held::Plain(values) if values.device().same_device(device) => self.clone(),
            _ if device.is_cpu() => self.clone(),
            Held::Matrix(matrix) if matrix.form() == PackedForm::Mxfp4 => {
                Held::Matrix(Arc::new(matrix.to_device(device)?))
            }
            _ => Held::Plain(self.decoded(spec)?.to_dtype(dtype)?.to_device(device)?),
        })
    }

    /// Its f32 values on the host, in the shape of `spec`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn decoded(&self, spec: &ParameterSpec) -> Result<Tensor> {
        Ok(match self {
            Held::Plain(values) => on_host(values)?,
            Held::Matrix(matrix) => {
                let host = match matrix.bytes() {
                    Ok(_) => matrix.clone(),
                    Err(_) => Arc::new(matrix.to_device(&Device::Cpu)?),
                };
                Tensor::from_vec(host.decoded()?, spec.working_shape(), &Device::Cpu)?
            }
            Held::Table(table) => Tensor::from_vec(table.decoded(), spec.working_shape(), &Device::Cpu)?,
        })
    }

    /// For a layer, not learning.
    pub fn frozen(&self) -> Weight {
        match self {
            Held::Plain(values) => Weight::Plain(Parameter::frozen(values)),
            Held::Matrix(matrix) => Weight::Matrix(matrix.clone()),
            Held::Table(table) => Weight::Table(table.clone()),
        }
    }
}

impl Weight {
    /// A vector, or a small tensor, which is never packed.
    ///
    /// # Errors
    /// When it is.
    pub fn parameter(self) -> Result<Parameter> {
        match self {
            Weight::Plain(parameter) => Ok(parameter),
            Weight::Matrix(_) | Weight::Table(_) | Weight::Adapted(..) => {
                bail!("a packed or adapted tensor where a plain one belongs")
            }
        }
    }

    /// A matrix that multiplies.
    ///
    /// # Errors
    /// When it is a table.
    pub fn projection(self, bias: Option<Parameter>) -> Result<Projection> {
        match self {
            Weight::Plain(weight) => Ok(Projection::Dense { weight, bias }),
            Weight::Matrix(weight) => Ok(Projection::Packed { weight, bias }),
            Weight::Adapted(base, adapter) => {
                Ok(Projection::Adapted { base: Box::new(base.projection(bias)?), adapter })
            }
            Weight::Table(_) => bail!("a table where a matrix belongs"),
        }
    }

    /// What ids are looked up in; `tied` where it is the head too.
    ///
    /// # Errors
    /// When it is arranged to be multiplied by, and only looked up, or the other way round.
    pub fn embedding(self, tied: bool) -> Result<Embedding> {
        match self {
            weight if tied => Ok(Embedding::Tied(weight.projection(None)?)),
            Weight::Plain(parameter) => Ok(Embedding::Plain(parameter)),
            Weight::Table(table) => Ok(Embedding::Packed(table)),
            Weight::Matrix(_) | Weight::Adapted(..) => bail!("a matrix where a table belongs"),
        }
    }
}

impl Embedding {
    /// Rows `ids`, `[T, H]`.
    ///
    /// # Errors
    /// When an id is not below `V`.
    pub fn rows(&self, ids: &Arc<Vec<u32>>) -> Result<Tensor> {
        Ok(match self {
            Embedding::Plain(parameter) => ops::embedding(parameter, ids)?,
            Embedding::Packed(table) => ops::packed::packed_rows(table, ids)?,
            Embedding::Tied(Projection::Dense { weight, .. }) => ops::tied_embedding(weight, ids)?,
            Embedding::Tied(Projection::Packed { weight, .. }) => ops::packed::packed_columns(weight, ids)?,
            Embedding::Tied(Projection::Adapted { .. }) => bail!("no adapter reaches the embedding"),
        })
    }

    /// The same, not learning.
    pub fn without_gradient(&self) -> Self {
        match self {
            Embedding::Plain(parameter) => Embedding::Plain(parameter.without_gradient()),
            Embedding::Packed(table) => Embedding::Packed(table.clone()),
            Embedding::Tied(head) => Embedding::Tied(head.without_gradient()),
        }
    }
}

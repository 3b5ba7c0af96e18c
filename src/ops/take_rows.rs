//! Rows of a tensor in another order.

use super::cpu::{gather_rows, host_ids};
use super::cuda::dispatch_forward;
use super::experts::Dispatch;
use super::graph::{apply, apply_without_gradient, contiguous};
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};

/// Returns rows `rows`, u32 `[R]`, of `x [T, H]`: `[R, H]`. The result has no gradient.
///
/// # Errors
/// When shapes disagree. A row that does not exist is not checked on a GPU.
pub fn take_rows(x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    apply_without_gradient(&contiguous(x)?, TakeRows { rows: rows.clone() })
}

/// Returns the rows of `x [T, H]`, which are sorted by `plan`, in the order of tokens. Each token has one
/// expert.
///
/// # Errors
/// When shapes disagree.
pub fn unsort(x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
    if plan.rows() != plan.tokens() || x.dim(0)? != plan.rows() {
        bail!("unsort: x {:?}, but the plan has {} tokens and {} rows", x.dims(), plan.tokens(), plan.rows());
    }
    apply([&contiguous(x)?], Unsort { plan: plan.clone() })
}

struct Unsort {
    plan: Dispatch,
}

impl Operation<1> for Unsort {
    const NAME: &'static str = "unsort";

    fn cpu(&self, inputs: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        TakeRows { rows: self.plan.row_of()? }.cpu(inputs)
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        dispatch_forward(x, &self.plan.row_of()?)
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Some(take_rows(grad, &self.plan.token_of()?)?)])
    }
}

struct TakeRows {
    rows: Tensor,
}

impl Operation<1> for TakeRows {
    const NAME: &'static str = "take_rows";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let ((count, width), rows) = (x.shape().dims2()?, host_ids(&self.rows)?);
        if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
            bail!("take_rows: row {row} of {count}");
        }
        let out = gather_rows(x.values()?, &rows, width);
        Ok((CpuStorage::F32(out), Shape::from((rows.len(), width))))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        dispatch_forward(x, &self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dispatch;
    use crate::ops::graph::differentiate;
    use candle_core::Device;

    #[test]
    fn rows_sorted_by_expert_return_to_their_tokens_and_so_do_gradients() {
        let routes = Tensor::from_vec(vec![2u32, 0, 1, 2, 0, 0], (6, 1), &Device::Cpu).unwrap();
        let plan = Dispatch::new(&routes, 4).unwrap();
        let rows = |x: &Tensor| x.to_vec2::<f32>().unwrap();
        let x = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((6, 2)).unwrap();
        assert_eq!(rows(&unsort(&dispatch(&x, &plan).unwrap(), &plan).unwrap()), rows(&x));
        let found = differentiate(&[&x], || Result::Ok(vec![(unsort(&x, &plan)?, x.clone())])).unwrap();
        // The gradient of a sorted row is that of its token.
        assert_eq!(rows(found[0].as_ref().unwrap()), rows(&dispatch(&x, &plan).unwrap()));
        let two =
            Dispatch::new(&Tensor::zeros((3, 2), candle_core::DType::U32, &Device::Cpu).unwrap(), 4).unwrap();
        assert!(unsort(&x, &two).unwrap_err().to_string().contains("3 tokens and 6 rows"));
    }
}

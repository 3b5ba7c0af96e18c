//! Gradients of every parameter, summed over micro-batches in order.

use candle_core::Tensor;

/// One buffer a parameter, in [`crate::model::names::parameter_specs`] order; `None` where it does not learn.
#[derive(Debug, Clone)]
pub struct Gradients {
    pub values: Vec<Option<Vec<f32>>>,
}

impl Gradients {
    /// No gradient yet for any of `parameters` tensors.
    pub fn none(parameters: usize) -> Self {
        Self { values: vec![None; parameters] }
    }

    /// Adds a tensor's gradient to parameter `index`.
    ///
    /// # Errors
    /// When the tensor cannot be read as f32.
    pub fn add_tensor(&mut self, index: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let values = gradient.flatten_all()?.to_vec1::<f32>()?;
        self.add_values(index, values);
        Ok(())
    }

    fn add_values(&mut self, index: usize, values: Vec<f32>) {
        match &mut self.values[index] {
            Some(sum) => sum.iter_mut().zip(&values).for_each(|(s, v)| *s += v),
            empty => *empty = Some(values),
        }
    }

    /// Adds another micro-batch's gradients.
    pub fn add(&mut self, other: Gradients) {
        for (index, values) in other.values.into_iter().enumerate() {
            if let Some(values) = values {
                self.add_values(index, values);
            }
        }
    }

    /// The norm over all parameters.
    pub fn global_norm(&self) -> f64 {
        let squares = |values: &Vec<f32>| values.iter().map(|&g| g as f64 * g as f64).sum::<f64>();
        self.values.iter().flatten().map(squares).sum::<f64>().sqrt()
    }

    /// Scales all gradients down to `norm_max` where they exceed it; 0 means no limit. Returns the norm before.
    pub fn clip(&mut self, norm_max: f64) -> f64 {
        let norm = self.global_norm();
        if norm_max > 0.0 && norm > norm_max {
            let scale = (norm_max / (norm + 1e-6)) as f32;
            self.values.iter_mut().flatten().flatten().for_each(|g| *g *= scale);
        }
        norm
    }
}

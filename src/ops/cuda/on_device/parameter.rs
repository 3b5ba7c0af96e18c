//! Where a graph begins and ends, on a GPU or the emulated driver.

use super::{assert_refused, differentiated, floats, learning, numbers, up};
use crate::ops::cuda::{add_tensor, open};
use crate::ops::{Parameter, upstream};
use candle_core::{DType, Tensor, Var};

#[test]
fn a_tracked_parameters_gradient_is_added_to_what_its_buffer_held() {
    let gpu = open(0).unwrap();
    for count in [1, 257] {
        let [values, held, dy] = [1, 2, 3]
            .map(|seed| numbers(seed, 1, count, 1.0).flatten_all().unwrap().to_device(&gpu).unwrap());
        let (parameter, sum) = learning(&values, &held);
        let tracked = parameter.tracked().unwrap();
        assert_eq!(floats(&tracked), floats(&values));
        for _ in 0..2 {
            let gradients = upstream(&tracked, &dy).unwrap().backward().unwrap();
            assert!(gradients.get(parameter.values()).is_none());
        }
        let expected = floats(&held).into_iter().zip(floats(&dy)).map(|(held, dy)| held + dy + dy);
        assert_eq!(floats(&sum), expected.collect::<Vec<_>>());
    }
}

#[test]
fn an_upstream_gradient_arrives_unchanged_and_by_its_scale() {
    let gpu = open(0).unwrap();
    for dtype in [DType::BF16, DType::F32] {
        let [y, dy] = [4, 5].map(|seed| up(&numbers(seed, 3, 16, 1.0), &gpu).to_dtype(dtype).unwrap());
        let (_, gradients) = differentiated(&[&y], &dy, |x| x[0].affine(1.0, 0.0));
        assert_eq!((floats(&gradients[0]), gradients[0].dtype()), (floats(&dy), dtype));
        let y = Var::from_tensor(&y).unwrap();
        let root = upstream(&y, &dy).unwrap();
        assert_eq!(root.to_scalar::<f32>().unwrap(), 0.0);
        let halved = (root * 0.5).unwrap().backward().unwrap();
        assert_eq!(floats(halved.get(&y).unwrap()), floats(&(&dy * 0.5).unwrap()));
    }
    let empty = Var::zeros((0, 16), DType::BF16, &gpu).unwrap();
    let gradients = upstream(&empty, &empty.detach()).unwrap().backward().unwrap();
    assert_eq!(gradients.get(&empty).unwrap().dims(), [0, 16]);
}

#[test]
fn nothing_is_added_where_there_is_nothing_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros(0, DType::F32, &gpu).unwrap();
    let (parameter, _) = learning(&empty, &empty);
    upstream(&parameter.tracked().unwrap(), &empty).unwrap().backward().unwrap();
    let held = Tensor::ones(3, DType::F32, &gpu).unwrap();
    let half = Tensor::ones(3, DType::BF16, &gpu).unwrap();
    assert_refused(add_tensor(&held, &half), "parameter: the gradient [3] is BF16, expected F32 on a GPU");
    assert_refused(add_tensor(&held, &empty), "the gradient has shape [0], expected [3]");
    assert_refused(learning(&half, &held).0.tracked(), "the values [3] is BF16, expected F32");
    assert!(Parameter::frozen(&half).tracked().is_ok());
}

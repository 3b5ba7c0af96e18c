//! Tests of parameters as inputs of a graph, on a GPU or the emulated driver.

use super::{assert_refused, floats, forward_and_backward, numbers, trainable_parameter};
use crate::ops::Parameter;
use crate::ops::cuda::{add_tensor, open};
use candle_core::{DType, Tensor};

#[test]
fn a_tracked_parameters_gradient_is_added_to_what_its_buffer_held() {
    let gpu = open(0).unwrap();
    for count in [1, 257] {
        let [values, held, dy] = [1, 2, 3]
            .map(|seed| numbers(seed, 1, count, 1.0).flatten_all().unwrap().to_device(&gpu).unwrap());
        let (parameter, sum) = trainable_parameter(&values, &held);
        let tracked = parameter.graph_tensor().unwrap();
        assert_eq!(floats(&tracked), floats(&values));
        for _ in 0..2 {
            let (_, gradients) =
                forward_and_backward(&[parameter.values()], &dy, || parameter.graph_tensor());
            assert!(gradients[0].is_none());
        }
        let expected = floats(&held).into_iter().zip(floats(&dy)).map(|(held, dy)| held + dy + dy);
        assert_eq!(floats(&sum), expected.collect::<Vec<_>>());
    }
}

#[test]
fn nothing_is_added_where_there_is_nothing_and_what_does_not_fit_is_refused() {
    let gpu = open(0).unwrap();
    let empty = Tensor::zeros(0, DType::F32, &gpu).unwrap();
    let (parameter, _) = trainable_parameter(&empty, &empty);
    forward_and_backward(&[], &empty, || parameter.graph_tensor());
    let held = Tensor::ones(3, DType::F32, &gpu).unwrap();
    let half = Tensor::ones(3, DType::BF16, &gpu).unwrap();
    assert_refused(add_tensor(&held, &half), "parameter: the gradient [3] is BF16, expected F32 on a GPU");
    assert_refused(add_tensor(&held, &empty), "the gradient has shape [0], expected [3]");
    assert_refused(
        trainable_parameter(&half, &held).0.graph_tensor(),
        "the values [3] is BF16, expected F32",
    );
    assert!(Parameter::constant(&half).graph_tensor().is_ok());
}

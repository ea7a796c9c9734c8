//! The manual's optimizer for candle: steps of two tensors, one of which has a gradient in every other step.

#[path = "optimizers/adamw.rs"]
mod adamw;
mod candle_adamw;

use candle_core::{backprop::GradStore, Device, Result, Tensor, Var};
use candle_nn::Optimizer;

fn main() -> Result<()> {
    let begin = |values: Vec<f32>, shape: [usize; 2]| {
        let tensor = Tensor::from_vec(values, shape, &Device)?;
        Var::from_tensor(&tensor)
    };
    let vars = [begin(vec![1.0, -2.0, 3.0, -4.0, 5.0, -6.0], [2, 3])?, begin(vec![0.5, 0.25], [1, 2])?];
    let mut optimizer = candle_adamw::AdamW::new(vars.to_vec(), adamw::Hyper::default())?;
    optimizer.set_learning_rate(0.05);
    assert!(optimizer.learning_rate() == 0.05);
    for step in 0..6 {
        let mut grads = GradStore::default();
        for var in &vars[..1 + step % 2] {
            let values = var.flatten_all()?.to_vec1::<f32>()?;
            let grad = values.iter().map(|x| 2.0 * x - 1.0).collect();
            grads.insert(var, Tensor::from_vec(grad, var.shape(), var.device())?);
        }
        optimizer.step(&grads)?;
    }
    for var in vars {
        println!("{:?}", var.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(())
}

//! A stand-in for candle-nn: its trait of optimizers, with the functions that an optimizer must have.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};

pub trait Optimizer: Sized {
    type Config: Sized;

    fn new(vars: Vec<Var>, config: Self::Config) -> Result<Self>;

    fn step(&mut self, grads: &GradStore) -> Result<()>;

    fn learning_rate(&self) -> f64;

    fn set_learning_rate(&mut self, lr: f64);
}

//! A stand-in for candle-core: the functions that the manual calls, declared as candle declares them, on the CPU.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub enum Error {
    Wrapped(Box<dyn std::error::Error + Send + Sync>),
    Msg(String),
}

impl Error {
    pub fn wrap(err: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Wrapped(Box::new(err))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Shape(Vec<usize>);

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}

#[derive(Clone, Debug)]
pub struct Device;

pub trait WithDType: Copy {
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl WithDType for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }

    fn to_f32(self) -> f32 {
        self
    }
}

#[derive(Clone, Debug)]
pub struct Tensor {
    values: Rc<RefCell<Vec<f32>>>,
    shape: Shape,
    device: Device,
}

impl Tensor {
    pub fn from_vec<S: Into<Shape>, D: WithDType>(data: Vec<D>, shape: S, device: &Device) -> Result<Self> {
        let (shape, values) = (shape.into(), data.into_iter().map(D::to_f32).collect::<Vec<_>>());
        if values.len() != shape.0.iter().product() {
            return Err(Error::Msg(format!("{} elements for {shape:?}", values.len())));
        }
        Ok(Tensor { values: Rc::new(RefCell::new(values)), shape, device: device.clone() })
    }

    pub fn flatten_all(&self) -> Result<Self> {
        let shape = Shape(vec![self.values.borrow().len()]);
        Ok(Tensor { shape, ..self.clone() })
    }

    /// An error for a tensor of another number of dimensions than 1.
    pub fn to_vec1<D: WithDType>(&self) -> Result<Vec<D>> {
        if self.shape.0.len() != 1 {
            return Err(Error::Msg(format!("{:?} is not of one dimension", self.shape)));
        }
        Ok(self.values.borrow().iter().map(|&x| D::from_f32(x)).collect())
    }

    pub fn dims(&self) -> &[usize] {
        &self.shape.0
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    fn id(&self) -> *const RefCell<Vec<f32>> {
        Rc::as_ptr(&self.values)
    }
}

#[derive(Clone, Debug)]
pub struct Var(Tensor);

impl Deref for Var {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl Var {
    pub fn from_tensor(tensor: &Tensor) -> Result<Self> {
        let values = Rc::new(RefCell::new(tensor.values.borrow().clone()));
        Ok(Var(Tensor { values, ..tensor.clone() }))
    }

    /// An error for a tensor of the same memory, or of another shape.
    pub fn set(&self, src: &Tensor) -> Result<()> {
        if self.id() == src.id() || self.shape != src.shape {
            return Err(Error::Msg(format!("{:?} cannot be set to {:?}", self.shape, src.shape)));
        }
        self.values.borrow_mut().clone_from(&src.values.borrow());
        Ok(())
    }
}

pub mod backprop {
    use super::{HashMap, RefCell, Tensor};

    #[derive(Debug, Default)]
    pub struct GradStore(HashMap<*const RefCell<Vec<f32>>, Tensor>);

    impl GradStore {
        pub fn get(&self, tensor: &Tensor) -> Option<&Tensor> {
            self.0.get(&tensor.id())
        }

        pub fn insert(&mut self, tensor: &Tensor, grad: Tensor) -> Option<Tensor> {
            self.0.insert(tensor.id(), grad)
        }
    }
}

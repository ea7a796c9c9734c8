//! A recurrent cell whose gradients come in segments, each recomputed from its first value and then forgotten.
//!
//! The gradients of all segments are added before the one step of a rule that is not linear in them. Reads
//! `initial.bin`, and writes the merged gradients of all steps, and the parameters after steps with merged gradients
//! and after a step for every segment.

use std::collections::HashMap;
use std::error::Error;
use std::fs;

mod matrices;
mod vectors;

const SIDE: usize = 6;
const CELLS: usize = 8;
const SEGMENT: usize = 2;
const STEPS: usize = 5;

/// Gradients by the name of a parameter.
type Store = HashMap<&'static str, Vec<f64>>;

fn read(file: &str) -> Result<Vec<f64>, Box<dyn Error>> {
    let read = |x: &[u8]| f64::from_le_bytes(x.try_into().unwrap());
    Ok(fs::read(file)?.chunks_exact(8).map(read).collect())
}

fn write(file: &str, values: &[f64]) -> Result<(), Box<dyn Error>> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(fs::write(file, bytes)?)
}

fn cell(w: &[f64], b: &[f64], h: &[f64]) -> Vec<f64> {
    let row = |i: usize| (0..SIDE).map(|j| w[i * SIDE + j] * h[j]).sum::<f64>() + b[i];
    (0..SIDE).map(|i| row(i).tanh()).collect()
}

/// The gradients of one segment, and of the values that it begins with: the values between are computed again.
fn segment(w: &[f64], b: &[f64], first: &[f64], behind: Vec<f64>) -> (Store, Vec<f64>) {
    let mut values = vec![first.to_vec()];
    for k in 0..SEGMENT {
        values.push(cell(w, b, &values[k]));
    }
    let (mut dw, mut db, mut back) = (vec![0.0; SIDE * SIDE], vec![0.0; SIDE], behind);
    for k in (0..SEGMENT).rev() {
        let mut before = vec![0.0; SIDE];
        for i in 0..SIDE {
            let delta = back[i] * (1.0 - values[k + 1][i] * values[k + 1][i]);
            db[i] += delta;
            for j in 0..SIDE {
                dw[i * SIDE + j] += delta * values[k][j];
                before[j] += delta * w[i * SIDE + j];
            }
        }
        back = before;
    }
    (Store::from([("w", dw), ("b", db)]), back)
}

/// The store of every segment, for half the squared distance of the last values from 0.5.
fn backward(w: &[f64], b: &[f64], first: &[f64]) -> Vec<Store> {
    let (mut kept, mut h) = (Vec::new(), first.to_vec());
    for k in 0..CELLS {
        if k % SEGMENT == 0 {
            kept.push(h.clone());
        }
        h = cell(w, b, &h);
    }
    let mut back = h.iter().map(|x| x - 0.5).collect();
    let mut stores = Vec::new();
    for first in kept.iter().rev() {
        let (store, before) = segment(w, b, first, back);
        stores.push(store);
        back = before;
    }
    stores
}

/// One store with the sums of all.
fn merged(stores: Vec<Store>) -> Store {
    let mut sums = Store::new();
    for (name, grad) in stores.into_iter().flatten() {
        match sums.get_mut(name) {
            Some(sum) => sum.iter_mut().zip(grad).for_each(|(sum, g)| *sum += g),
            None => _ = sums.insert(name, grad),
        }
    }
    sums
}

struct Model {
    w: Vec<f64>,
    b: Vec<f64>,
    states: (matrices::State, vectors::State),
}

impl Model {
    fn new(initial: &[f64]) -> Result<Self, Box<dyn Error>> {
        let (w, b) = initial.split_at(SIDE * SIDE);
        let w_state = matrices::State::new(&Default::default(), &[SIDE, SIDE], w)?;
        let b_state = vectors::State::new(&Default::default(), &[SIDE], b)?;
        Ok(Model { w: w.to_vec(), b: b.to_vec(), states: (w_state, b_state) })
    }

    fn step(&mut self, store: &Store) -> Result<(), Box<dyn Error>> {
        let wide = matrices::Hyper { lr: 0.02, ..Default::default() };
        let narrow = vectors::Hyper { lr: 0.02, ..Default::default() };
        matrices::step(&mut self.states.0, &wide, &mut self.w, &store["w"])?;
        vectors::step(&mut self.states.1, &narrow, &mut self.b, &store["b"])?;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let read = read("initial.bin")?;
    let (initial, first) = read.split_at(SIDE * SIDE + SIDE);
    let (mut once, mut often) = (Model::new(initial)?, Model::new(initial)?);
    let mut recorded = Vec::new();
    for _ in 0..STEPS {
        let store = merged(backward(&once.w, &once.b, first));
        recorded.extend_from_slice(&store["w"]);
        recorded.extend_from_slice(&store["b"]);
        once.step(&store)?;
        for store in backward(&often.w, &often.b, first) {
            often.step(&store)?;
        }
    }
    write("gradients.bin", &recorded)?;
    write("merged.bin", &[once.w, once.b].concat())?;
    write("each.bin", &[often.w, often.b].concat())?;
    println!("{} {}", once.states.0.steps(), often.states.0.steps());
    Ok(())
}

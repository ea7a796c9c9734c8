//! A network of two layers learns digits; its parameters lie in one array and are updated in place.
//!
//! Reads `data.bin` and `initial.bin`, and writes the gradients of all steps and the last parameters.
#![allow(unexpected_cfgs)]

use std::error::Error;
use std::fs;

mod matrices;
mod vectors;

#[cfg(wide)]
type Real = f64;
#[cfg(not(wide))]
type Real = f32;

const PIXELS: usize = 64;
const HIDDEN: usize = 24;
const CLASSES: usize = 10;
const BATCH: usize = 32;
const SIZES: [usize; 4] = [PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES];
const LR: f64 = 0.01;

fn reals(file: &str) -> Result<Vec<Real>, Box<dyn Error>> {
    const BYTES: usize = size_of::<Real>();
    let read = |x: &[u8]| Real::from_le_bytes(x.try_into().unwrap());
    Ok(fs::read(file)?.chunks_exact(BYTES).map(read).collect())
}

fn write(file: &str, values: &[Real]) -> Result<(), Box<dyn Error>> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(fs::write(file, bytes)?)
}

/// The four parts of an array of all parameters or gradients.
fn parts(all: &mut [Real]) -> [&mut [Real]; 4] {
    let (w1, rest) = all.split_at_mut(SIZES[0]);
    let (b1, rest) = rest.split_at_mut(SIZES[1]);
    let (w2, b2) = rest.split_at_mut(SIZES[2]);
    [w1, b1, w2, b2]
}

/// The loss of one image, 1 if it is recognised, and its gradients added to `grads`.
fn learn(params: &mut [Real], grads: &mut [Real], image: &[Real], label: usize) -> (Real, usize) {
    let [w1, b1, w2, b2] = parts(params);
    let [dw1, db1, dw2, db2] = parts(grads);
    let mut hidden = [0.0; HIDDEN];
    for j in 0..HIDDEN {
        let sum: Real = (0..PIXELS).map(|i| image[i] * w1[i * HIDDEN + j]).sum();
        hidden[j] = (sum + b1[j]).tanh();
    }
    let mut scores = [0.0; CLASSES];
    for k in 0..CLASSES {
        let sum: Real = (0..HIDDEN).map(|j| hidden[j] * w2[j * CLASSES + k]).sum();
        scores[k] = sum + b2[k];
    }
    let most = scores.iter().copied().fold(Real::NEG_INFINITY, Real::max);
    let right = usize::from(scores[label] == most);
    let total: Real = scores.iter().map(|s| (s - most).exp()).sum();
    let loss = total.ln() + most - scores[label];
    let mut back = [0.0; HIDDEN];
    for k in 0..CLASSES {
        let one: Real = if k == label { 1.0 } else { 0.0 };
        let delta = ((scores[k] - most).exp() / total - one) / BATCH as Real;
        db2[k] += delta;
        for j in 0..HIDDEN {
            dw2[j * CLASSES + k] += hidden[j] * delta;
            back[j] += w2[j * CLASSES + k] * delta;
        }
    }
    for j in 0..HIDDEN {
        let delta = back[j] * (1.0 - hidden[j] * hidden[j]);
        db1[j] += delta;
        for i in 0..PIXELS {
            dw1[i * HIDDEN + j] += image[i] * delta;
        }
    }
    (loss, right)
}

macro_rules! step {
    ($rule:ident, $state:expr, $hyper:expr, $p:expr, $g:expr) => {{
        #[cfg(not(hessian))]
        $rule::step($state, $hyper, $p, $g)?;
        #[cfg(hessian)]
        {
            let hessian: Vec<Real> = $g.iter().map(|g| g * g * BATCH as Real).collect();
            $rule::step($state, $hyper, $p, $g, &hessian)?;
        }
    }};
}

fn main() -> Result<(), Box<dyn Error>> {
    let (data, mut params) = (reals("data.bin")?, reals("initial.bin")?);
    let wide = matrices::Hyper { lr: LR, ..Default::default() };
    let narrow = vectors::Hyper { lr: LR, ..Default::default() };
    let [w1, b1, w2, b2] = parts(&mut params);
    let mut s1 = matrices::State::new(&wide, &[PIXELS, HIDDEN], w1)?;
    let mut s2 = vectors::State::new(&narrow, &[HIDDEN], b1)?;
    let mut s3 = matrices::State::new(&wide, &[HIDDEN, CLASSES], w2)?;
    let mut s4 = vectors::State::new(&narrow, &[CLASSES], b2)?;
    let (mut recorded, mut losses) = (Vec::new(), Vec::new());
    for batch in data.chunks_exact(BATCH * (PIXELS + 1)) {
        let mut grads = vec![0.0; params.len()];
        let (mut loss, mut right) = (0.0, 0);
        for sample in batch.chunks_exact(PIXELS + 1) {
            let (image, label) = sample.split_at(PIXELS);
            let (one, found) = learn(&mut params, &mut grads, image, label[0] as usize);
            loss += one / BATCH as Real;
            right += found;
        }
        recorded.extend_from_slice(&grads);
        losses.push((loss, right));
        let ([w1, b1, w2, b2], [g1, g2, g3, g4]) = (parts(&mut params), parts(&mut grads));
        step!(matrices, &mut s1, &wide, w1, g1);
        step!(vectors, &mut s2, &narrow, b1, g2);
        step!(matrices, &mut s3, &wide, w2, g3);
        step!(vectors, &mut s4, &narrow, b2, g4);
    }
    write("gradients.bin", &recorded)?;
    write("trained.bin", &params)?;
    #[cfg(moves)]
    {
        let [w1, b1, w2, b2] = parts(&mut params);
        matrices::to_evaluation(&mut s1, &wide, w1)?;
        vectors::to_evaluation(&mut s2, &narrow, b1)?;
        matrices::to_evaluation(&mut s3, &wide, w2)?;
        vectors::to_evaluation(&mut s4, &narrow, b2)?;
        write("evaluated.bin", &params)?;
        let [w1, b1, w2, b2] = parts(&mut params);
        matrices::to_training(&mut s1, &wide, w1)?;
        vectors::to_training(&mut s2, &narrow, b1)?;
        matrices::to_training(&mut s3, &wide, w2)?;
        vectors::to_training(&mut s4, &narrow, b2)?;
        write("back.bin", &params)?;
    }
    let last = &losses[losses.len() - 10..];
    let right: usize = last.iter().map(|x| x.1).sum();
    println!("{} {} {}", s1.steps(), losses[0].0, right as f64 / (10 * BATCH) as f64);
    Ok(())
}

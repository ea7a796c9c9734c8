//! Tensors in the bits of 16-bit floats, their states in codes, and weights rounded at random: steps with gradients
//! from `given.bin`, for the tensor of number 3 and the seed 11.

use std::error::Error;
use std::fs;

mod rule;

fn main() -> Result<(), Box<dyn Error>> {
    let read = |x: &[u8]| u16::from_le_bytes([x[0], x[1]]);
    let given: Vec<u16> = fs::read("given.bin")?.chunks_exact(2).map(read).collect();
    let count = given.len() / 4;
    let mut param = given[..count].to_vec();
    let hyper = rule::Hyper { lr: 0.01, ..Default::default() };
    let mut state = rule::State::new(&hyper, &[count], &param, 11, 3)?;
    for grad in given[count..].chunks_exact(count) {
        rule::step(&mut state, &hyper, &mut param, grad)?;
    }
    let bytes: Vec<u8> = param.iter().flat_map(|x| x.to_le_bytes()).collect();
    fs::write("param.bin", bytes)?;
    fs::write("state.bin", state.as_bytes())?;
    Ok(())
}

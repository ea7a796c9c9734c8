//! Wrong calls: each is refused, and neither the parameter nor the state has changed.

use std::fmt::Debug;

mod adafactor;
mod adamw;
mod muon;
mod schedule_free_adamw;
mod sophia;

/// Prints what a call was refused with.
fn refused<T: Debug, E: std::error::Error>(what: &str, result: Result<T, E>) {
    println!("{what}: {}", result.expect_err(what));
}

macro_rules! refused_step {
    ($rule:ident, $what:expr, $state:expr, $hyper:expr, $p:expr $(, $more:expr)*) => {{
        let before = ($p.to_vec(), $state.as_bytes().to_vec());
        refused($what, $rule::step(&mut $state, $hyper, &mut $p $(, $more)*));
        assert!(before == ($p.to_vec(), $state.as_bytes().to_vec()), $what);
    }};
}

fn shared<T: Send + Sync + Clone + Debug>(_: &T) {}

fn lengths() {
    let hyper = adamw::Hyper::default();
    let (mut p, g) = ([1.0_f32; 6], [0.5_f32; 6]);
    refused("shape", adamw::State::new(&hyper, &[2, 4], &p));
    refused("parameter of none", adamw::State::new(&hyper, &[2, 3], &[]));
    let mut state = adamw::State::new(&hyper, &[2, 3], &p).unwrap();
    shared(&state);
    refused_step!(adamw, "short parameter", state, &hyper, p[..5], &g);
    refused_step!(adamw, "short gradient", state, &hyper, p, &g[..5]);
    refused_step!(adamw, "long gradient", state, &hyper, p, &[0.5_f32; 7]);
    refused_step!(adamw, "empty gradient", state, &hyper, p, &[]);
    let mut other = adamw::State::new(&hyper, &[7], &[0.0; 7]).unwrap();
    refused_step!(adamw, "state of another shape", other, &hyper, p, &g);
    adamw::step(&mut state, &hyper, &mut p, &g).unwrap();
    assert!(state.steps() == 1 && p != [1.0; 6]);

    let hyper = sophia::Hyper::default();
    let mut state = sophia::State::new(&hyper, &[6], &p).unwrap();
    refused_step!(sophia, "short hessian", state, &hyper, p, &g, &[1.0; 5]);
}

fn numbers() {
    let (mut p, g, usual) = ([1.0_f32; 6], [0.5_f32; 6], adamw::Hyper::default());
    let mut state = adamw::State::new(&usual, &[6], &p).unwrap();
    for wrong in [f64::NAN, -1.0, f64::NEG_INFINITY] {
        let hyper = adamw::Hyper { lr: wrong, ..usual };
        refused("begin", adamw::State::new(&hyper, &[6], &p));
        refused_step!(adamw, "rate", state, &hyper, p, &g);
    }
    let hyper = adamw::Hyper { beta1: 1.0, ..usual };
    refused_step!(adamw, "average", state, &hyper, p, &g);

    let usual = schedule_free_adamw::Hyper::default();
    let mut state = schedule_free_adamw::State::new(&usual, &[6], &p).unwrap();
    let wrong = schedule_free_adamw::Hyper { lr: f64::NAN, ..usual };
    let before = (p, state.as_bytes().to_vec());
    refused("move", schedule_free_adamw::to_evaluation(&mut state, &wrong, &mut p));
    refused("move back", schedule_free_adamw::to_training(&mut state, &usual, &mut p[1..]));
    assert!(before == (p, state.as_bytes().to_vec()));
}

fn shapes() {
    let hyper = muon::Hyper::default();
    refused("vector", muon::State::new(&hyper, &[6], &[0.0; 6]));
    refused("number", muon::State::new(&hyper, &[], &[0.0]));
    let hyper = adafactor::Hyper::default();
    refused("overflow", adafactor::State::new(&hyper, &[usize::MAX, 2], &[]));
    // 2**62 columns of 4 bytes each are 0 bytes in 64 bits.
    refused("empty, with columns", adafactor::State::new(&hyper, &[0, 1 << 62], &[]));
    refused("empty, at last", adafactor::State::new(&hyper, &[1 << 40, 1 << 40, 0], &[]));
    refused("beyond memory", adafactor::State::new(&hyper, &[0, isize::MAX as usize / 128], &[]));
}

fn empty() {
    for shape in [&[0][..], &[0, 4], &[3, 0, 5]] {
        let hyper = adafactor::Hyper::default();
        let mut state = adafactor::State::new(&hyper, shape, &[]).unwrap();
        adafactor::step(&mut state, &hyper, &mut [], &[]).unwrap();
        assert!((state.steps(), state.count()) == (1, 0));
        refused("one of none", adafactor::step(&mut state, &hyper, &mut [1.0], &[1.0]));
    }
    let hyper = adamw::Hyper::default();
    let mut state = adamw::State::new(&hyper, &[0], &[]).unwrap();
    adamw::step(&mut state, &hyper, &mut [], &[]).unwrap();
    let mut state = adamw::State::new(&hyper, &[], &[1.0]).unwrap();
    adamw::step(&mut state, &hyper, &mut [1.0], &[1.0]).unwrap();
}

fn checkpoints() {
    let (hyper, g) = (adafactor::Hyper::default(), [0.5_f32; 12]);
    let mut p = [1.0_f32; 12];
    let mut state = adafactor::State::new(&hyper, &[4, 3], &p).unwrap();
    adafactor::step(&mut state, &hyper, &mut p, &g).unwrap();
    let saved = state.as_bytes().to_vec();
    refused("too few bytes", adafactor::State::from_bytes(&[4, 3], &saved[1..]));
    refused("other bytes", adafactor::State::from_bytes(&[4, 3], &vec![7; saved.len()]));
    let mut counted = saved.clone();
    counted[8..16].copy_from_slice(&i64::MAX.to_ne_bytes());
    refused("too many steps", adafactor::State::from_bytes(&[4, 3], &counted));
    let mut turned = adafactor::State::from_bytes(&[3, 4], &saved).unwrap();
    refused_step!(adafactor, "turned", turned, &hyper, p, &g);
    let (mut again, mut kept) = (adafactor::State::from_bytes(&[4, 3], &saved).unwrap(), p);
    let mut cloned = (state.clone(), p);
    adafactor::step(&mut state, &hyper, &mut p, &g).unwrap();
    adafactor::step(&mut again, &hyper, &mut kept, &g).unwrap();
    assert!(p == kept && state.as_bytes() == again.as_bytes());
    assert!(cloned.0.as_bytes() == saved && cloned.0.steps() == 1);
    adafactor::step(&mut cloned.0, &hyper, &mut cloned.1, &g).unwrap();
    assert!(p == cloned.1);
    assert!(state.as_bytes().as_ptr() as usize % 64 == 0);
}

fn main() {
    lengths();
    numbers();
    shapes();
    empty();
    checkpoints();
}

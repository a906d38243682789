//! The checks of each family.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use plica_comm::launch::{Backend, cause_of};
use plica_comm::suite::{self, OnDevice, Threads};
use plica_comm::{DeviceMaker, DeviceRequest};
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::{Device, conformance};

use super::{Check, SelfTest, Verdict};
use crate::golden::{Golden, Tensors, differences, models, run, run_forward};
use crate::verify::{Filter, all_cases, verify_on};

/// Of the cases of an operation family, the quick form takes each so manieth.
const QUICK_OPERATIONS: usize = 4;
/// The same of the cases of the communication.
pub(super) const QUICK_SUITE: usize = 5;
/// Ranks of the compared layouts, and each so manieth case.
const LAYOUTS: (usize, usize) = (4, 4);
/// The same of the quick form.
const QUICK_LAYOUTS: (usize, usize) = (2, 60);

pub(super) fn verdict(result: Result<(), String>) -> Verdict {
    result.map_or_else(Verdict::Failed, |()| Verdict::Passed)
}

/// Operations beside their CPU twins, one after another on one device.
pub(super) fn operations(test: &SelfTest) -> Vec<Check> {
    let device: Rc<RefCell<Option<Device>>> = Rc::default();
    let mut of_family = ("".to_string(), 0);
    let mut all = Vec::new();
    for case in conformance::cases() {
        let (family, name) = case.name.split_once(": ").unwrap_or(("operations", &case.name));
        of_family = if of_family.0 == family { (of_family.0, of_family.1 + 1) } else { (family.into(), 0) };
        if test.quick && of_family.1 % QUICK_OPERATIONS != 0 {
            continue;
        }
        let (maker, device) = (test.device.clone(), device.clone());
        all.push(Check::new(family, name, move || operation(&maker, &device, &*case.run)));
    }
    all
}

/// One case. A device that unwound is not used again: a failed GPU answers every call with the same error.
fn operation(
    maker: &DeviceMaker,
    kept: &RefCell<Option<Device>>,
    run: &dyn Fn(&Device) -> Result<(), String>,
) -> Verdict {
    let device = match kept.take() {
        Some(device) => device,
        None => match maker.make(&DeviceRequest { rank: 0, local_rank: 0, threads: 1, budget_bytes: None }) {
            Ok(device) => device,
            Err(error) => return Verdict::Failed(error.to_string()),
        },
    };
    match catch_unwind(AssertUnwindSafe(|| run(&device))) {
        Err(payload) => Verdict::Failed(cause_of(payload).to_string()),
        Ok(result) => {
            let live = device.ledger().now().total_bytes();
            kept.replace(Some(device));
            verdict(result.and_then(|()| match live {
                0 => Ok(()),
                bytes => Err(format!("{bytes} bytes stay in memory")),
            }))
        }
    }
}

/// The conformance suite of the communication, the ranks' tensors on the device.
pub(super) fn communication(test: &SelfTest) -> Vec<Check> {
    let step = if test.quick { QUICK_SUITE } else { 1 };
    let check = |case: suite::Case| {
        let device = test.device.clone();
        Check::new("communication", case.name, move || {
            let launcher = OnDevice { launcher: &Threads, device: &device };
            verdict((case.run)(&launcher).map_err(|error| error.to_string()))
        })
    };
    suite::cases().into_iter().step_by(step).map(check).collect()
}

/// Published models: activations, logits, gradients and five steps, on one rank and on four that share the device; in
/// the quick form the forward of one of them.
pub(super) fn golden_models(test: &SelfTest) -> anyhow::Result<Vec<Check>> {
    const FAMILY: &str = "golden models";
    let Some(folder) = &test.golden else {
        let skipped = || Verdict::Skipped("no golden data (--golden FOLDER)".into());
        return Ok(vec![Check::new(FAMILY, "all", skipped)]);
    };
    let (found, _) = models(folder)?;
    let mut all = Vec::new();
    for golden in found.into_iter().map(Rc::new).take(if test.quick { 1 } else { usize::MAX }) {
        let (device, own, quick) = (test.device.clone(), golden.clone(), test.quick);
        all.push(Check::new(FAMILY, format!("{}, one rank", golden.name), move || {
            compared(&own, &Layout::one(), &device, quick)
        }));
        if let Some(layout) = folded(&golden).filter(|_| !quick) {
            let (device, own) = (test.device.clone(), golden.clone());
            all.push(Check::new(FAMILY, format!("{}, {layout}", golden.name), move || {
                compared(&own, &layout, &device, false)
            }));
        }
    }
    Ok(all)
}

/// Attention over two data-parallel ranks times what divides the heads, experts over two.
fn folded(golden: &Golden) -> Option<Layout> {
    let model = &golden.hub.model;
    let tp = if model.heads.is_multiple_of(2) && model.kv_heads.is_multiple_of(2) { 2 } else { 1 };
    let (ep, etp) = if golden.hub.moe.is_some() { (2, 1) } else { (1, tp) };
    Layout::new(&LayoutSpec { world: 2 * tp, tp, ep, etp: Some(etp), ..LayoutSpec::default() }).ok()
}

fn compared(golden: &Golden, layout: &Layout, device: &DeviceMaker, forward: bool) -> Verdict {
    let computed: anyhow::Result<Tensors> = match forward {
        false => run::<f32>(golden, layout, device),
        true => run_forward::<f32>(golden, layout, device),
    };
    match computed {
        Err(error) => Verdict::Failed(format!("{error:#}")),
        Ok(computed) => {
            let mut found = differences(golden, &layout.to_string(), &computed);
            if forward {
                found.retain(|text| !text.ends_with(": not computed"));
            }
            let first = found.first().map(|first| format!("{first} ({} tensors differ)", found.len()));
            verdict(first.map_or(Ok(()), Err))
        }
    }
}

/// Layouts of several ranks that share the device against one rank of the CPU, in f64.
pub(super) fn layouts(test: &SelfTest) -> Vec<Check> {
    let (world, step) = if test.quick { QUICK_LAYOUTS } else { LAYOUTS };
    let cases = all_cases(world, &Filter::default());
    let check = |case: crate::verify::Case| {
        let device = test.device.clone();
        Check::new("layouts", case.name(), move || {
            let outcome = verify_on(&Backend::Threads, &device, std::slice::from_ref(&case), |_| {});
            match outcome.first().map(|outcome| (outcome.passed(), outcome)) {
                Some((true, _)) => Verdict::Passed,
                Some((false, outcome)) => {
                    let differs = outcome.worst.as_ref().map(|worst| format!("{worst:?}"));
                    let text = outcome.error.clone().or(differs).unwrap_or_default();
                    Verdict::Failed(format!("{text}; {}", outcome.command))
                }
                None => Verdict::Failed("no outcome".into()),
            }
        })
    };
    cases.into_iter().step_by(step).map(check).collect()
}

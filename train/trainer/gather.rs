//! From what each rank counted to the numbers of the run: times as the mean over ranks, bytes as the sum,
//! memory of the rank with the highest peak, expert load over the last steps.

use std::collections::BTreeMap;

use plica_comm::record::Exposure;
use plica_comm::{CommError, Purpose, Reduce};
use plica_dense::{BatchScale, Phase, Trainable};
use plica_kernels::Category;
use plica_kernels::ledger::Snapshot;
use plica_moe::MoeReport;
use plica_moe::load::{Imbalance, dropped_share};

use crate::config::{Balance, Config};
use crate::metrics::StepRecord;
use crate::report::{CommunicationTime, LayerLoad, MemoryUse};
use crate::step::Engine;

/// Steps over which the load of the summary is taken.
const WINDOW_STEPS: usize = 20;

/// Reports of the last steps.
pub(super) type LayerWindow = Vec<(usize, MoeReport)>;

/// What a rank has counted up to a moment: nanoseconds by phase, then bytes, operations, exposed and hidden
/// nanoseconds by purpose, then the two times of all purposes together.
#[derive(Clone, Default)]
pub(super) struct Books(Vec<f64>);

impl Books {
    /// The books of this rank now.
    pub(super) fn now<T: Trainable>(engine: &Engine<T>) -> Books {
        let mut counted: Vec<f64> = engine.phases.total_ns().iter().map(|ns| *ns as f64).collect();
        for purpose in Purpose::ALL {
            let traffic = engine.recorder.by_purpose(purpose);
            let time = engine.recorder.exposure(Some(purpose));
            counted.extend([traffic.sent_bytes as f64, traffic.operations as f64]);
            counted.extend([time.exposed_ns as f64, time.hidden_ns as f64]);
        }
        let time = engine.recorder.exposure(None);
        counted.extend([time.exposed_ns as f64, time.hidden_ns as f64]);
        Books(counted)
    }

    /// What was counted since an earlier moment.
    pub(super) fn since(&self, earlier: &Books) -> Books {
        Books(self.0.iter().zip(&earlier.0).map(|(now, then)| now - then).collect())
    }

    /// Adds what was counted at another time.
    pub(super) fn add(&mut self, other: &Books) {
        self.0.resize(other.0.len(), 0.0);
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own += other);
    }
}

/// Sums over ranks.
pub(super) struct RankSums {
    /// (phase, nanoseconds), mean over ranks.
    pub phases: Vec<(String, u64)>,
    /// (purpose, bytes, operations), all ranks.
    pub bytes: Vec<(String, u64, u64)>,
    /// Communication time, mean over ranks; none where no rank talked to another.
    pub communication: Option<CommunicationTime>,
}

/// Keeps the reports of the last steps.
pub(super) fn add_to_window(window: &mut Vec<LayerWindow>, layers: &[(usize, MoeReport)]) {
    if window.len() == WINDOW_STEPS {
        window.remove(0);
    }
    window.push(layers.to_vec());
}

/// Load and losses of the router for a step's record: the worst layer, and the mean over layers of each loss.
pub(super) fn add_load(record: &mut StepRecord, layers: &[(usize, MoeReport)], config: &Config) {
    let Some(moe) = config.moe.as_ref().filter(|_| !layers.is_empty()) else { return };
    let scale = BatchScale {
        micro_batches: (config.train.micro_batches * config.layout.dp()) as u64,
        sequences: config.train.global_batch as u64,
        tokens: layers[0].1.tokens,
    };
    let mean = |f: &dyn Fn(&MoeReport) -> f64| {
        layers.iter().map(|(_, report)| f(report)).sum::<f64>() / layers.len() as f64
    };
    let worst = layers.iter().map(|(_, r)| Imbalance::of(&r.counts_e).max_over_mean).fold(0.0, f64::max);
    record.load.insert("max/mean".into(), worst);
    if moe.capacity.is_some() {
        let share = |r: &MoeReport| dropped_share(r.counts_e.iter().sum::<i64>() as u64, r.dropped());
        record.load.insert("dropped".into(), mean(&share));
    }
    let values = |r: &MoeReport| r.values(moe.top_k, &scale);
    for (balance, _) in &moe.balance {
        let value = match balance {
            Balance::None => continue,
            Balance::Micro => mean(&|r| values(r).micro),
            Balance::Sequence => mean(&|r| values(r).sequence),
            Balance::Global => mean(&|r| values(r).global),
        };
        record.auxiliary.insert(format!("balance {}", balance.name()), value);
    }
    if moe.z_loss > 0.0 {
        record.auxiliary.insert("z".into(), mean(&|r| values(r).z));
    }
}

/// What all ranks together counted; every rank calls it with its own books.
pub(super) fn rank_sums<T: Trainable>(engine: &Engine<T>, own: &Books) -> Result<RankSums, CommError> {
    let world = engine.mesh.world();
    let all = world.all_reduce_f64(Purpose::Metrics, &engine.device, &own.0, Reduce::Sum)?;
    let (times, traffic) = all.split_at(Phase::ALL.len());
    let phases = Phase::ALL
        .iter()
        .zip(times)
        .filter(|(_, ns)| **ns > 0.0)
        .map(|(phase, ns)| (phase.name().to_string(), (ns / world.size() as f64) as u64))
        .collect();
    let (traffic, total) = traffic.split_at(4 * Purpose::ALL.len());
    let used = Purpose::ALL.iter().zip(traffic.chunks(4)).filter(|(_, sums)| sums[1] > 0.0);
    let bytes: Vec<(String, u64, u64)> = used
        .clone()
        .map(|(purpose, sums)| (purpose.name().to_string(), sums[0] as u64, sums[1] as u64))
        .collect();
    let mean = |sums: &[f64]| {
        let [exposed_ns, hidden_ns] = [sums[0], sums[1]].map(|ns| (ns / world.size() as f64) as u64);
        Exposure { exposed_ns, hidden_ns }
    };
    let communication = (!bytes.is_empty()).then(|| CommunicationTime {
        total: mean(total),
        by_purpose: used.map(|(purpose, sums)| (purpose.name().to_string(), mean(&sums[2..]))).collect(),
    });
    Ok(RankSums { phases, bytes, communication })
}

/// Adds what all ranks counted in a step to its record; every rank calls it.
pub(super) fn add_rank_sums<T: Trainable>(
    record: &mut StepRecord,
    engine: &Engine<T>,
    own: &Books,
    peak: &Snapshot,
) -> Result<(), CommError> {
    let sums = rank_sums(engine, own)?;
    record.time_ns = sums.phases.into_iter().collect();
    if let Some(time) = sums.communication {
        let all = time.by_purpose.into_iter().chain([("all".to_string(), time.total)]);
        for (name, time) in all {
            record.exposed_ns.insert(name.clone(), time.exposed_ns);
            record.hidden_ns.insert(name, time.hidden_ns);
        }
    }
    record.bytes = sums.bytes.into_iter().map(|(name, bytes, _)| (name, bytes)).collect();
    let memory = memory(engine, peak, &Snapshot::default())?;
    record.memory_bytes =
        memory.into_iter().map(|m| (m.category, m.at_peak_bytes)).collect::<BTreeMap<_, _>>();
    Ok(())
}

/// Memory of the rank with the highest peak: at the peak and after a step; every rank calls it.
pub(super) fn memory<T: Trainable>(
    engine: &Engine<T>,
    peak: &Snapshot,
    after_step: &Snapshot,
) -> Result<Vec<MemoryUse>, CommError> {
    let mut own = vec![peak.total_bytes() as usize];
    own.extend(Category::ALL.iter().map(|c| peak.get(*c) as usize));
    own.extend(Category::ALL.iter().map(|c| after_step.get(*c) as usize));
    let all = engine.mesh.world().exchange_counts(Purpose::Metrics, &engine.device, &own)?;
    let worst = all.iter().max_by_key(|row| row[0]).expect("a world has a rank");
    let (at_peak, after) = worst[1..].split_at(Category::ALL.len());
    Ok(Category::ALL
        .iter()
        .zip(at_peak.iter().zip(after))
        .filter(|(_, (peak, after))| **peak + **after > 0)
        .map(|(category, (peak, after))| MemoryUse {
            category: category.name().to_string(),
            at_peak_bytes: *peak as u64,
            after_step_bytes: *after as u64,
        })
        .collect())
}

/// Load of every MoE layer over the window.
pub(super) fn layer_loads(window: &[LayerWindow], config: &Config) -> Vec<LayerLoad> {
    let Some(moe) = &config.moe else { return Vec::new() };
    let mut sums: BTreeMap<usize, MoeReport> = BTreeMap::new();
    for (layer, report) in window.iter().flatten() {
        sums.entry(*layer).or_default().add(report);
    }
    sums.into_iter()
        .map(|(layer, report)| LayerLoad::measure(layer, &report.counts_e, moe.top_k, report.dropped()))
        .collect()
}

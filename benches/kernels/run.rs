//! Checks, times and keeps what was measured.

use std::collections::BTreeMap;
use std::process;
use std::time::{Duration, Instant};

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use cubecl::future::block_on;
use cubecl::prelude::*;
use dar_burn::device::OpenDevice;
use dar_kernels::launches;

use crate::buffer::Copy;
use crate::composed::{Graph, Output, OutputKind, is_half};
use crate::fused::{Fused, Packing};
use crate::shapes::{self, BF16, Direction, F16, F32, Operation, Problem};
use crate::support::cli::{self, Failure, failed};
use crate::support::machine::{self, Machine};
use crate::support::report::{CopyPoint, KernelResult, KernelsPart};
use crate::support::statistics::Spread;

/// A run of an operation may take as long as a copy of its bytes that takes this long.
const LONGEST_COPY: Duration = Duration::from_millis(4);
const LONGEST_QUICK_COPY: Duration = Duration::from_millis(2);
/// Samples of a benchmark, the fewest that criterion takes.
const SAMPLES: usize = 10;
/// Copies are measured at powers of two from here on.
const SMALLEST_COPY: u64 = 1 << 20;
/// A copy that is larger than all caches.
const CALIBRATION: u64 = 64 << 20;

/// All benchmarks of one device.
pub struct Bench {
    criterion: Criterion,
    /// Runs what the command line asks for once, unmeasured: criterion would take the making of operands for a slow run.
    rehearsal: Option<Criterion>,
    device: Device,
    cpu: Device,
    client: Client,
    quick: bool,
    /// That an operation may move.
    most_bytes: u64,
    copies: BTreeMap<u64, Spread>,
    results: Vec<KernelResult>,
}

/// Seconds of one run of an operation, of every sample that criterion took.
type Seconds = Vec<f64>;

impl Bench {
    /// `most_bytes`: that an operation may move; none takes what suits the device.
    pub fn new(opened: &OpenDevice, quick: bool, most_bytes: Option<u64>) -> Result<Self, Failure> {
        let DispatchDevice::Cube(device) = opened.device.as_dispatch() else {
            return Err(Failure::usage(format!("{} has no kernels", opened.name)));
        };
        let criterion = Criterion::default().sample_size(SAMPLES);
        let criterion = if quick {
            let short = Duration::from_millis(100);
            criterion.warm_up_time(short).measurement_time(short).without_plots()
        } else {
            criterion.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(1))
        };
        let asked = |flag: &str| std::env::args().any(|argument| argument.starts_with(flag));
        let measures = asked("--bench") && !asked("--list") && !asked("--test") && !asked("--profile-time");
        let once = || Criterion::default().configure_from_args().profile_time(Some(Duration::from_nanos(1)));
        let mut bench = Self {
            criterion: criterion.configure_from_args(),
            rehearsal: measures.then(once),
            client: device.client(),
            device: opened.device.clone(),
            cpu: machine::truth_device()?.device,
            quick,
            most_bytes: 0,
            copies: BTreeMap::new(),
            results: Vec::new(),
        };
        bench.most_bytes = match most_bytes {
            Some(most_bytes) => most_bytes,
            None => {
                let rate = CALIBRATION as f64 / bench.copy(CALIBRATION)?.median;
                let longest = if quick { LONGEST_QUICK_COPY } else { LONGEST_COPY };
                (rate * longest.as_secs_f64()) as u64
            }
        };
        Ok(bench)
    }

    /// That an operation may move.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// Every operation, direction, implementation and size, with Burn's fusion.
    pub fn run_all(&mut self) -> Result<(), Failure> {
        self.run(|bench, problem, direction| {
            bench.fused(problem, direction, Packing::InverseRms)?;
            // Both packings have one backward.
            if direction == Direction::Forward && matches!(problem.operation, Operation::Pack | Operation::Prefix) {
                bench.fused(problem, direction, Packing::Keys)?;
            }
            bench.composed("composed", problem, direction)
        })
    }

    /// The composed graph alone, under this name.
    pub fn run_composed(&mut self, name: &'static str) -> Result<(), Failure> {
        self.run(|bench, problem, direction| bench.composed(name, problem, direction))
    }

    fn run(&mut self, measure: impl Fn(&mut Self, Problem, Direction) -> Result<(), Failure>) -> Result<(), Failure> {
        let problems = self.problems();
        let mut operations: Vec<Operation> = problems.iter().map(|problem| problem.operation).collect();
        operations.sort();
        operations.dedup();
        for operation in operations {
            for direction in [Direction::Forward, Direction::Backward] {
                let fits =
                    |problem: &&Problem| problem.operation == operation && problem.directions().contains(&direction);
                for &problem in problems.iter().filter(fits) {
                    measure(self, problem, direction)?;
                }
            }
        }
        self.criterion.final_summary();
        Ok(())
    }

    /// What was measured.
    pub fn finish(self, machine: Machine) -> KernelsPart {
        let copies = self.copies.into_iter().map(|(bytes, seconds)| CopyPoint { bytes, seconds });
        KernelsPart { machine, copies: copies.collect(), results: self.results }
    }

    /// Everything, at sizes that the device holds and does in reasonable time, without repetitions.
    fn problems(&self) -> Vec<Problem> {
        let stores = |dtype: &ElemType| self.client.properties().supports_type(*dtype);
        let dtypes: Vec<ElemType> = [F32, F16, BF16].into_iter().filter(stores).collect();
        let problems = if self.quick { shapes::few() } else { shapes::all(&dtypes) };
        let most_bytes = self.most_bytes;
        let memory = &self.client.properties().memory;
        // The composed graph holds many states besides the operands.
        let most_in_memory = memory.max_memory().map_or(u64::MAX, |memory| memory / 16);
        let fits = |problem: &Problem| {
            problem.directions().iter().all(|&direction| problem.bytes(direction) <= most_bytes.min(most_in_memory))
                && problem.largest_buffer() <= memory.max_page_size
        };
        let mut scaled: Vec<Problem> = Vec::new();
        for problem in problems.into_iter().map(|problem| problem.scaled(fits)) {
            let same = |other: &Problem| Problem { full_tokens: other.full_tokens, ..problem } == *other;
            if !scaled.iter().any(same) {
                scaled.push(problem);
            }
        }
        scaled
    }

    fn fused(&mut self, problem: Problem, direction: Direction, packing: Packing) -> Result<(), Failure> {
        let (client, cpu) = (self.client.clone(), self.cpu.clone());
        let mut fused: Option<Fused> = None;
        let name = match packing {
            Packing::InverseRms => "fused",
            Packing::Keys => "fused_keys",
        };
        self.bench(name, problem, direction, move |iterations| {
            let fused = match &mut fused {
                Some(fused) => fused,
                none => {
                    let made = Fused::new(&client, problem, direction, packing).map_err(failed("kernels refuse"))?;
                    let before = launches();
                    made.launch().map_err(failed("kernels refuse"))?;
                    assert!(launches() > before, "no kernel ran");
                    check(name, problem, direction, &made.outputs(), &cpu)?;
                    none.insert(made)
                }
            };
            let begin = Instant::now();
            for _ in 0..iterations {
                fused.launch().map_err(failed("kernels refuse"))?;
            }
            synchronise(&client)?;
            Ok(begin.elapsed())
        })
    }

    fn composed(&mut self, name: &'static str, problem: Problem, direction: Direction) -> Result<(), Failure> {
        let (device, cpu) = (self.device.clone(), self.cpu.clone());
        let mut graph: Option<Graph> = None;
        self.bench(name, problem, direction, move |iterations| {
            let graph = match &mut graph {
                Some(graph) => graph,
                none => {
                    let made = Graph::new(problem, direction, &device);
                    check(name, problem, direction, &outputs(&made, direction), &cpu)?;
                    none.insert(made)
                }
            };
            let sync = || graph.device().sync().map_err(failed("the graph failed"));
            let mut spent = Duration::ZERO;
            match direction {
                Direction::Forward => {
                    sync()?;
                    let begin = Instant::now();
                    for _ in 0..iterations {
                        let outputs = graph.forward();
                        // While they are there: what nobody holds would not have to be written.
                        graph.device().flush().map_err(failed("the graph failed"))?;
                        drop(outputs);
                    }
                    sync()?;
                    spent += begin.elapsed();
                }
                Direction::Backward => {
                    for _ in 0..iterations {
                        let loss = graph.loss();
                        sync()?;
                        let begin = Instant::now();
                        let gradients = loss.backward();
                        sync()?;
                        spent += begin.elapsed();
                        drop(gradients);
                    }
                }
            }
            Ok(spent)
        })
    }

    /// `run` a number of times under criterion, if the command line asks for it, and a copy of as many bytes.
    fn bench(
        &mut self,
        implementation: &str,
        problem: Problem,
        direction: Direction,
        mut run: impl FnMut(u64) -> Result<Duration, Failure>,
    ) -> Result<(), Failure> {
        let bytes = problem.bytes(direction);
        let mut result = KernelResult {
            group: format!("{}_{}", problem.operation.name(), direction.name()),
            implementation: implementation.into(),
            dtype: problem.dtype.to_string(),
            entries: problem.entries,
            queries: problem.queries,
            tokens: problem.tokens,
            streams: problem.streams,
            d_model: problem.d_model,
            full_tokens: problem.full_tokens,
            bytes,
            seconds: Spread { low: 0.0, median: 0.0, high: 0.0 },
            copy_bytes_per_s: 0.0,
        };
        let mut seconds = Seconds::new();
        let mut run = |iterations| {
            run(iterations).unwrap_or_else(|failure| {
                // Criterion would keep any time that it got.
                cli::exit(Err(failure));
                process::exit(1)
            })
        };
        let id = || BenchmarkId::new(implementation, format!("{}_{}", result.dtype, result.size()));
        if let Some(rehearsal) = &mut self.rehearsal {
            let mut group = rehearsal.benchmark_group(&result.group);
            group.bench_function(id(), |bencher| bencher.iter_custom(&mut run));
        }
        let mut group = self.criterion.benchmark_group(&result.group);
        // As often in every sample: some runs take a second, and the default takes the last sample's ten times as often.
        group.throughput(Throughput::Bytes(bytes)).sampling_mode(SamplingMode::Flat);
        group.bench_function(id(), |bencher| {
            bencher.iter_custom(|iterations| {
                let spent = run(iterations);
                seconds.push(spent.as_secs_f64() / iterations as f64);
                spent
            });
        });
        group.finish();
        // Those before are criterion's warm-up.
        let measured = &seconds[seconds.len().saturating_sub(SAMPLES)..];
        if !measured.is_empty() {
            result.seconds = Spread::of(measured);
            let copied = bytes.next_power_of_two().max(SMALLEST_COPY);
            result.copy_bytes_per_s = copied as f64 / self.copy(copied)?.median;
            self.results.push(result);
        }
        Ok(())
    }

    /// Seconds of a copy that moves `bytes`, or as many as fit.
    fn copy(&mut self, bytes: u64) -> Result<Spread, Failure> {
        let bytes = bytes.min(self.client.properties().memory.max_page_size);
        if let Some(&known) = self.copies.get(&bytes) {
            return Ok(known);
        }
        let copy = Copy::new(&self.client, bytes);
        copy.launch(&self.client);
        if !copy.is_right() {
            return Err(Failure::run("a copy is not what it copied"));
        }
        let times = |launches: u32| {
            let begin = Instant::now();
            (0..launches).for_each(|_| copy.launch(&self.client));
            synchronise(&self.client).map(|()| begin.elapsed().as_secs_f64() / f64::from(launches))
        };
        let once = times(4)?;
        let sample = if self.quick { 0.005 } else { 0.02 };
        let launches = ((sample / once) as u32).clamp(1, 1000);
        let seconds = (0..SAMPLES).map(|_| times(launches)).collect::<Result<Vec<_>, _>>()?;
        let spread = Spread::of(&seconds);
        self.copies.insert(bytes, spread);
        Ok(spread)
    }
}

fn synchronise(client: &Client) -> Result<(), Failure> {
    block_on(client.sync()).map_err(|error| Failure::run(format!("the device failed: {error:?}")))
}

fn outputs(graph: &Graph, direction: Direction) -> Vec<Output> {
    let computed = match direction {
        Direction::Forward => graph.forward(),
        Direction::Backward => graph.gradients(&graph.loss().backward()),
    };
    computed.into_iter().map(|computed| computed.output()).collect()
}

/// Refuses an operation that computes anything but the graph in f64.
fn check(
    implementation: &str,
    problem: Problem,
    direction: Direction,
    outputs: &[Output],
    cpu: &Device,
) -> Result<(), Failure> {
    let truth = self::outputs(&Graph::truth(problem, direction, cpu), direction);
    let bound = match problem.dtype {
        dtype if !is_half(dtype) => 1e-4,
        F16 => 8.0 * f64::from(half::f16::EPSILON),
        _ => 8.0 * f64::from(half::bf16::EPSILON),
    };
    // The outputs of one name come in the same order on both sides.
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for output in outputs {
        let index = seen.entry(output.name).or_default();
        let mut expected = truth.iter().filter(|truth| truth.name == output.name);
        let Some(expected) = expected.nth(*index) else {
            return Err(Failure::run(format!("there is no truth of `{}`", output.name)));
        };
        *index += 1;
        let error = match (&output.kind, &expected.kind) {
            (OutputKind::Tokens(ends), OutputKind::Tokens([truth, _])) => {
                ends.iter().map(|end| relative_error(end, truth, 1.0)).fold(0.0, f64::max)
            }
            (OutputKind::Sum(sum), OutputKind::Sum(truth)) => {
                relative_error(sum, truth, problem.tokens as f64 / crate::buffer::PERIOD as f64)
            }
            _ => f64::INFINITY,
        };
        // NaN is in no range.
        if !(0.0..=bound).contains(&error) {
            return Err(Failure::run(format!(
                "{implementation} {} {} of {problem:?}: `{}` is off by {error:.1e}, bound {bound:.1e}: not timed",
                problem.operation.name(),
                direction.name(),
                output.name
            )));
        }
    }
    Ok(())
}

/// Root mean square of the difference, relative to that of `truth * scale`.
fn relative_error(got: &[f64], truth: &[f64], scale: f64) -> f64 {
    if got.len() != truth.len() {
        return f64::INFINITY;
    }
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(truth).map(|(got, truth)| square(got - scale * truth)).sum();
    let size: f64 = truth.iter().map(|truth| square(scale * truth)).sum();
    (difference / size.max(f64::MIN_POSITIVE)).sqrt()
}

//! What the streams do.

use dar_burn::diagnostics::ndarray::{Array2, ArrayView3, Axis};
use dar_burn::diagnostics::{
    DepthSplit, GateRescue, Intervention, MixerMean, MixerPairs, Record, RouteUse, cka_matrix, differing_winners,
    identity_deviation, mean_pair_cosine, rescue_gains, retrieval_maps, stream_cosines, write_gate_gap,
};

use crate::model::{Captured, Subject};
use crate::picture::{self, Curve, Scale};
use crate::progress;
use crate::report::{Report, number};
use crate::support::cli::{Failure, failed};

/// For `map_err` of a measurement.
pub fn wrong<E: std::fmt::Display>(error: E) -> Failure {
    failed("cannot measure")(error)
}

/// Retrieval maps (DAR paper, Figures 3 and A.3).
pub fn retrieval(report: &mut Report, subject: &Subject, captured: &Captured) -> Result<(), Failure> {
    let branches = 2 * subject.layers();
    let weights = captured.records.range(..branches).filter_map(|(_, record)| record.retrieval.as_ref());
    let of_branches: Vec<ArrayView3<'_, f64>> = weights.map(|weights| weights.view()).collect();
    if of_branches.is_empty() {
        report.leave_out("Retrieval maps", "this residual retrieves nothing from earlier layers.");
        return Ok(());
    }
    report.section(
        "Which earlier states are retrieved",
        "Row l is a layer, column 0 the embedding and column b the state of block b (of the block that is still open, its \
         partial state); a row sums to 1. Weight near the diagonal reads what is recent, weight in a column reads one state \
         again and again, and two streams with different dark cells divide the depth between them (DAR paper, Figures 3 and \
         A.3).",
    );
    let maps = retrieval_maps(&of_branches).map_err(wrong)?;
    let mut rows = Vec::new();
    for (name, title, maps) in [
        ("retrieval_attention", "Retrieval before attention", &maps.attention),
        ("retrieval_feed_forward", "Retrieval before feed-forward", &maps.feed_forward),
    ] {
        let panels: Vec<_> =
            maps.iter().enumerate().map(|(stream, map)| (format!("stream {stream}"), map.clone())).collect();
        report.picture(name, title, |path| {
            picture::heat_maps(path, title, ["entry", "layer"], &panels, Scale { name: "weight", low: 0.0, high: 1.0 })
        })?;
        for (stream, map) in maps.iter().enumerate() {
            let cells = map.indexed_iter().filter(|(_, weight)| !weight.is_nan());
            rows.extend(cells.map(|((layer, entry), &weight)| {
                let branch = title.rsplit(' ').next().unwrap_or_default();
                vec![branch.to_owned(), stream.to_string(), layer.to_string(), entry.to_string(), number(weight)]
            }));
        }
    }
    if let Some(output) = captured.records.get(&branches).and_then(|record| record.retrieval.as_ref()) {
        let mean = output.mean_axis(Axis(1)).expect("at least one token"); // [candidates, streams]
        rows.extend(mean.indexed_iter().map(|((entry, stream), &weight)| {
            let [layer, entry] = [subject.layers(), entry].map(|place| place.to_string());
            vec!["output".to_owned(), stream.to_string(), layer, entry, number(weight)]
        }));
    }
    report.table("retrieval", &["branch", "stream", "layer", "entry", "weight"], &rows)
}

/// The states of a stream at the end of every layer, `[sampled, d_model]` each.
fn ends(subject: &Subject, captured: &Captured, stream: usize) -> Vec<Array2<f64>> {
    let end = |layer: usize| captured.records.get(&(2 * layer + 1))?.state.as_ref();
    let states = (0..subject.layers()).filter_map(end);
    states.map(|state| state.index_axis(Axis(1), stream).to_owned()).collect()
}

/// Streams of the states that were recorded.
fn streams(captured: &Captured) -> usize {
    captured.records.values().filter_map(|record| record.state.as_ref()).map(|state| state.dim().1).max().unwrap_or(0)
}

/// CKA across streams and depths (DAR paper, Figure 5), and cosines of the streams (mHC stream analysis).
pub fn likeness(report: &mut Report, subject: &Subject, captured: &Captured) -> Result<(), Failure> {
    let streams = streams(captured);
    if streams < 2 {
        report.leave_out("CKA and cosines between streams", "this residual carries one stream.");
        return Ok(());
    }
    report.section(
        "Do the streams hold the same?",
        "Linear CKA is 1 where the states of two streams differ by a rotation and a scale, and near 0 where they are \
         unrelated. A dark diagonal means that the streams agree at equal depth, a dark block that many depths repeat one \
         another, a dark column that one state of a stream is like every state of the other (DAR paper, Figure 5). States \
         are those after the feed-forward branch.",
    );
    let states: Vec<_> = (0..streams).map(|stream| ends(subject, captured, stream)).collect();
    let (mut panels, mut rows) = (Vec::new(), Vec::new());
    for i in 0..streams {
        for j in i + 1..streams {
            let map = cka_matrix(&states[i], &states[j]).map_err(wrong)?;
            rows.extend(map.indexed_iter().map(|((a, b), &cka)| {
                [i, a, j, b].map(|place| place.to_string()).into_iter().chain([number(cka)]).collect::<Vec<_>>()
            }));
            panels.push((format!("rows: stream {i}, columns: stream {j}"), map));
        }
    }
    report.picture("cka", "Linear CKA across streams and depths", |path| {
        let scale = Scale { name: "CKA", low: 0.0, high: 1.0 };
        picture::heat_maps(
            path,
            "Linear CKA after each layer",
            ["layer of the column's stream", "layer"],
            &panels,
            scale,
        )
    })?;
    report.table("cka", &["row_stream", "row_layer", "column_stream", "column_layer", "cka"], &rows)?;

    report.section(
        "Do the streams point the same way?",
        "The mean cosine between the streams of a token after every branch: 1 for streams in the same direction, 0 for \
         unrelated ones (mHC stream analysis, 3). A blank is a stream that is zero. Both streams of DAR hold one branch \
         output after the first branch of a block, so they are parallel there by construction.",
    );
    let (mut rows, mut points) = (Vec::new(), Vec::new());
    for (branch, state) in captured.records.iter().filter_map(|(branch, record)| Some((branch, record.state.as_ref()?)))
    {
        let cosines = stream_cosines(state.view()).map_err(wrong)?;
        let mean = mean_pair_cosine(cosines.view()).map_err(wrong)?;
        points.push((*branch as f64, mean));
        let pairs = cosines.indexed_iter().filter(|((i, j), _)| i < j);
        rows.extend(
            pairs.map(|((i, j), &cosine)| vec![branch.to_string(), i.to_string(), j.to_string(), number(cosine)]),
        );
    }
    let curve = [Curve { name: "mean over pairs".into(), points, joined: true }];
    report.picture("cosine", "Cosine between streams", |path| {
        picture::curves(path, "Cosine between streams", ["branch", "mean cosine"], &curve)
    })?;
    report.table("cosine", &["branch", "stream", "other_stream", "cosine"], &rows)
}

/// Rescue gains (DAR paper, Figure 6) and write gates against them (Figure A.4).
pub fn rescue(report: &mut Report, subject: &Subject, captured: &Captured) -> Result<(), Failure> {
    let (streams, layers) = (streams(captured), subject.layers());
    if streams < 2 {
        report.leave_out("Rescue gains", "with one stream, keeping one is keeping all.");
        return Ok(());
    }
    let bar = progress("rescue gains", layers * (streams + 1));
    let mut gains = Array2::zeros((layers, streams));
    for layer in 0..layers {
        let run = |kept| {
            let logits = subject.changed(captured, Intervention::KeepStream { branch: 2 * layer + 1, kept });
            bar.inc(1);
            logits
        };
        let keep: Vec<_> = (0..streams).map(|stream| run(Some(stream))).collect();
        let keep: Vec<_> = keep.iter().map(|logits| logits.view()).collect();
        let of_layer = rescue_gains(captured.logits.view(), &keep, run(None).view()).map_err(wrong)?;
        gains.row_mut(layer).iter_mut().zip(of_layer).for_each(|(cell, gain)| *cell = gain);
    }
    bar.finish_and_clear();
    report.section(
        "Does one stream suffice?",
        "After the feed-forward branch of a layer one stream is kept and the others are zero, at all tokens; states that \
         are stored already stay. A gain of 1 means that the kept stream gives the whole output back, 0 that it helps no \
         more than nothing, below 0 that it is worse than nothing (DAR paper, Figure 6). At the last layers all of it is \
         close to the output.",
    );
    // Far below zero the number says enough; the colours are for what is near.
    let low = gains.iter().copied().fold(0.0, f64::min).max(-1.0);
    report.picture("rescue", "Rescue gain by layer and kept stream", |path| {
        let scale = Scale { name: "gain", low, high: 1.0 };
        picture::heat_maps(path, "Rescue gain", ["kept stream", "layer"], &[(String::new(), gains.clone())], scale)
    })?;
    let rows: Vec<_> = gains
        .indexed_iter()
        .map(|((layer, stream), &gain)| vec![layer.to_string(), stream.to_string(), number(gain)])
        .collect();
    report.table("rescue", &["layer", "kept_stream", "gain"], &rows)?;
    gate_rescue(report, captured, &gains)
}

fn gate_rescue(report: &mut Report, captured: &Captured, gains: &Array2<f64>) -> Result<(), Failure> {
    let writes = (0..gains.nrows()).map(|layer| captured.records.get(&(2 * layer + 1))?.writes());
    let writes: Option<Vec<_>> = writes.collect();
    let Some(writes) = writes.filter(|_| gains.ncols() == 2) else {
        report.leave_out("Write gates against rescue gains", "they are defined for two streams with write weights.");
        return Ok(());
    };
    let gaps =
        writes.iter().map(|writes| write_gate_gap(writes.view())).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    let pairs: Vec<[f64; 2]> = gains.rows().into_iter().map(|gains| [gains[0], gains[1]]).collect();
    let measured = GateRescue::measure(&gaps, &pairs).map_err(wrong)?;
    report.section(
        "Is the stream that is written more the one that is needed?",
        "Each point is a layer: to the right its feed-forward branch writes stream 1 more than stream 0, and above zero \
         stream 1 rescues more. Points on a rising line mean that writing decides which stream carries the output (DAR \
         paper, Figure A.4).",
    );
    report.say(format!(
        "Mean absolute write gap {:.3}; least-squares line {:.3} x + {:.3}; correlation r = {:.3} over {} layers.",
        measured.mean_absolute_gate_gap,
        measured.line.slope,
        measured.line.intercept,
        measured.line.correlation,
        gaps.len()
    ));
    let low = gaps.iter().copied().fold(f64::MAX, f64::min);
    let high = gaps.iter().copied().fold(f64::MIN, f64::max);
    let on_line = |x: f64| (x, measured.line.slope * x + measured.line.intercept);
    let curves = [
        Curve { name: "layers".into(), points: measured.points.clone(), joined: false },
        Curve { name: "least squares".into(), points: vec![on_line(low), on_line(high)], joined: true },
    ];
    report.picture("gate_rescue", "Write gap against rescue gap", |path| {
        let axes = ["write gap (stream 1 - stream 0)", "rescue gap (stream 1 - stream 0)"];
        picture::curves(path, "Write gap against rescue gap", axes, &curves)
    })?;
    let points = measured.points.iter().enumerate();
    let rows: Vec<_> =
        points.map(|(layer, &(gate, rescue))| vec![layer.to_string(), number(gate), number(rescue)]).collect();
    report.table("gate_rescue", &["layer", "write_gap", "rescue_gap"], &rows)
}

/// How many streams are read and written, and which (mHC stream analysis, 3, 4 and A.2).
pub fn routes(report: &mut Report, subject: &Subject, captured: &Captured) -> Result<(), Failure> {
    let branches = 2 * subject.layers();
    let measure = |weights: fn(&Record) -> Option<&Array2<f64>>| -> Result<Vec<RouteUse>, Failure> {
        let of_branches = captured.records.range(..branches).filter_map(|(_, record)| weights(record));
        let measured = of_branches.map(|weights| RouteUse::measure(captured.by_sequence(weights).view()));
        measured.collect::<Result<_, _>>().map_err(wrong)
    };
    let (reads, writes) = (measure(Record::reads)?, measure(Record::writes)?);
    if reads.len() != branches || reads[0].load.len() < 2 {
        report.leave_out(
            "Read and write routes",
            "this residual has no weights with which a branch reads and writes streams.",
        );
        return Ok(());
    }
    let streams = reads[0].load.len();
    report.section(
        "How many streams does a branch use?",
        "From 1 (all weight on one stream) to the number of streams (even). Winner consistency is the share of tokens that \
         agree on the stream of largest weight (mHC stream analysis, 3). Reads are the weights of the branch input (alpha of \
         DAR, which weighs what was retrieved), writes those of its output (beta of DAR).",
    );
    let mean = |uses: &[RouteUse], value: fn(&RouteUse) -> f64| uses.iter().map(value).sum::<f64>() / uses.len() as f64;
    for (name, uses) in [("Reads", &reads), ("Writes", &writes)] {
        report.say(format!(
            "{name}: {:.3} of {streams} streams, winner consistency {:.3} (means over branches).",
            mean(uses, |site| site.effective_streams),
            mean(uses, |site| site.winner_consistency)
        ));
    }
    report.say(format!(
        "Reads and writes are dominated by different streams at {:.1} % of the branches.",
        100.0 * differing_winners(&reads, &writes).map_err(wrong)?
    ));
    let curve = |name: &str, uses: &[RouteUse]| Curve {
        name: name.into(),
        points: uses.iter().enumerate().map(|(branch, site)| (branch as f64, site.effective_streams)).collect(),
        joined: true,
    };
    report.picture("routes", "Effective streams by branch", |path| {
        let curves = [curve("read", &reads), curve("write", &writes)];
        picture::curves(path, "Effective streams", ["branch", "streams"], &curves)
    })?;
    let load = |uses: &[RouteUse]| Array2::from_shape_fn((uses.len(), streams), |(branch, j)| uses[branch].load[j]);
    report.picture("load", "Load of each stream by branch", |path| {
        let panels = [("reads".to_owned(), load(&reads)), ("writes".to_owned(), load(&writes))];
        let scale = Scale { name: "share", low: 0.0, high: 1.0 };
        picture::heat_maps(path, "Load", ["stream", "branch"], &panels, scale)
    })?;
    if let Ok(split) = DepthSplit::half(subject.layers()) {
        for (name, uses) in [("Reads", &reads), ("Writes", &writes)] {
            let dominant: Vec<usize> = uses.iter().map(RouteUse::dominant).collect();
            let lowest: Vec<usize> = uses.iter().map(RouteUse::lowest).collect();
            let dominated = split.dominated(&dominant, streams).map_err(wrong)?;
            let lowest = split.dominated(&lowest, streams).map_err(wrong)?;
            report.say(format!(
                "{name}: branches that each stream dominates, early {:?}, late {:?}; where it has the lowest load, early \
                 {:?}, late {:?} (late from layer {}).",
                dominated.early,
                dominated.late,
                lowest.early,
                lowest.late,
                split.late_from()
            ));
        }
    }
    let mut rows = Vec::new();
    for (name, uses) in [("read", &reads), ("write", &writes)] {
        rows.extend(uses.iter().enumerate().map(|(branch, site)| {
            let mut row = vec![name.to_owned(), branch.to_string()];
            row.extend([number(site.effective_streams), number(site.winner_consistency)]);
            row.extend([site.dominant().to_string(), site.lowest().to_string()]);
            row.extend(site.load.iter().map(|&load| number(load)));
            row
        }));
    }
    let loads: Vec<String> = (0..streams).map(|stream| format!("load_{stream}")).collect();
    let mut header = vec!["route", "branch", "effective_streams", "winner_consistency", "dominant", "lowest"];
    header.extend(loads.iter().map(String::as_str));
    report.table("routes", &header, &rows)
}

/// How strongly streams are mixed (mHC stream analysis, 3 and B). Returns the mean mixer of every branch.
pub fn mixers(
    report: &mut Report,
    subject: &Subject,
    captured: &Captured,
) -> Result<Option<Vec<Option<Array2<f64>>>>, Failure> {
    let (mut means, mut sites) = (vec![None; 2 * subject.layers()], Vec::new());
    for (&branch, mixers) in captured.records.iter().filter_map(|(branch, record)| Some((branch, record.mixers()?))) {
        let streams = mixers.dim().1;
        if streams < 2 {
            continue;
        }
        let mut mean = MixerMean::new(streams);
        mean.push(mixers.view()).map_err(wrong)?;
        sites.push((branch, identity_deviation(mixers.view()).map_err(wrong)?));
        means[branch] = mean.mean();
    }
    if sites.is_empty() {
        report.leave_out("Residual mixers", "this residual has none.");
        return Ok(None);
    }
    report.section(
        "Do the streams mix?",
        "Identity deviation is 0 where every stream is carried forward on its own and grows with the weight that a stream \
         takes from others (mHC stream analysis, 3). In DAR the mixer is the constrained transport M(rho); the first branch \
         of a block has none. The map shows which stream takes from which (B).",
    );
    let points = sites.iter().map(|&(branch, deviation)| (branch as f64, deviation)).collect();
    report.picture("identity_deviation", "Identity deviation by branch", |path| {
        let curve = [Curve { name: "mean over tokens".into(), points, joined: true }];
        picture::curves(path, "Identity deviation of the mixers", ["branch", "deviation"], &curve)
    })?;
    let early_late = |late: bool| {
        let half = subject.layers().div_ceil(2) * 2;
        let part: Vec<f64> =
            sites.iter().filter(|(branch, _)| (*branch >= half) == late).map(|&(_, deviation)| deviation).collect();
        part.iter().sum::<f64>() / part.len() as f64
    };
    report.say(format!(
        "Mean identity deviation {:.4}; early layers {:.4}, late layers {:.4} (late from layer {}).",
        sites.iter().map(|&(_, deviation)| deviation).sum::<f64>() / sites.len() as f64,
        early_late(false),
        early_late(true),
        subject.layers().div_ceil(2)
    ));
    let present: Vec<_> = means.iter().flatten().map(|mean: &Array2<f64>| mean.view()).collect();
    let pairs = MixerPairs::measure(&present).map_err(wrong)?;
    let names: Vec<String> = pairs.pairs.iter().map(|(to, from)| format!("{to}_from_{from}")).collect();
    let high = pairs.weights.iter().copied().fold(0.05, f64::max);
    let low = pairs.weights.iter().copied().fold(0.0, f64::min);
    report.picture("mixers", "Mixer weights by pair of streams", |path| {
        let title = format!("columns: {}", names.join(", "));
        let scale = Scale { name: "weight", low, high };
        let panel = [(title, pairs.weights.clone())];
        picture::heat_maps(path, "Mean mixer weights", ["pair (new stream from old)", "site"], &panel, scale)
    })?;
    let rows: Vec<_> = sites
        .iter()
        .zip(pairs.weights.rows())
        .map(|(&(branch, deviation), weights)| {
            let mut row = vec![branch.to_string(), number(deviation)];
            row.extend(weights.iter().map(|&weight| number(weight)));
            row
        })
        .collect();
    let mut header = vec!["branch", "identity_deviation"];
    header.extend(names.iter().map(String::as_str));
    report.table("mixers", &header, &rows)?;
    Ok(Some(means))
}

/// Router balance (DAR paper, Figure A.2).
pub fn balance(report: &mut Report, captured: &Captured) -> Result<(), Failure> {
    if captured.balance.is_empty() {
        report.leave_out("Router balance", "the feed-forward branches are dense.");
        return Ok(());
    }
    report.section(
        "Do the experts share the work?",
        "The auxiliary loss of the router is 1 where all experts are used evenly and grows to the number of experts where \
         one does everything (DAR paper, Figure A.2).",
    );
    let points = captured.balance.iter().enumerate().map(|(layer, &balance)| (layer as f64, balance)).collect();
    report.picture("balance", "Router balance by layer", |path| {
        let curve = [Curve { name: "auxiliary loss".into(), points, joined: true }];
        picture::curves(path, "Router balance", ["layer", "auxiliary loss"], &curve)
    })?;
    let layers = captured.balance.iter().enumerate();
    let rows: Vec<_> = layers.map(|(layer, &balance)| vec![layer.to_string(), number(balance)]).collect();
    report.table("balance", &["layer", "auxiliary_loss"], &rows)
}

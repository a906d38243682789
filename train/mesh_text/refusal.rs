//! Why a specification is refused, and the legal layouts nearest to it.

use plica_folding::{Layout, LayoutError, LayoutSpec, nearest_valid};

use super::line;

/// The error, both equations with the numbers as written, and the nearest valid layouts of the same world, nearest
/// first, with what each changes. Where the layout is valid by itself (the model was refused), no layouts are
/// listed: the error already names the nearest values.
pub fn explain_refusal(spec: &LayoutSpec, err: &LayoutError) -> String {
    let mut out = String::new();
    line(&mut out, &format!("refused: {err}"));
    line(&mut out, "");
    let (world, etp) = (spec.world, spec.etp_or_tp());
    let attention = Equation { free: "DP", left: [spec.tp, spec.cp], stated: spec.dp, pp: spec.pp, world };
    let expert = Equation { free: "EDP", left: [etp, spec.ep], stated: None, pp: spec.pp, world };
    line(&mut out, &format!("  attention  TP·CP·DP·PP   = {}", attention.text()));
    line(&mut out, &format!("  experts    ETP·EP·EDP·PP = {}", expert.text()));
    line(&mut out, "");
    if Layout::new(spec).is_ok() {
        line(&mut out, "Both equations hold: the layout is valid, but not with this model and batch.");
        return out;
    }
    let near = nearest_valid(spec);
    if near.is_empty() {
        line(&mut out, &format!("There is no layout of {world} ranks."));
        return out;
    }
    line(&mut out, &format!("nearest valid layouts of {world} ranks"));
    line(&mut out, "    TP   CP   DP   PP |  ETP   EP  EDP | order           | changed");
    for candidate in &near {
        if let Ok(layout) = Layout::new(candidate) {
            line(&mut out, &row(&layout, spec));
        }
    }
    out
}

/// One equation of the layout as the user wrote it.
struct Equation {
    free: &'static str,
    left: [usize; 2],
    stated: Option<usize>,
    pp: usize,
    world: usize,
}

impl Equation {
    /// `8·1·DP·1 = 12: DP = 12/8 is not whole`.
    fn text(&self) -> String {
        let Equation { free, left: [a, b], stated, pp, world } = self;
        let product = [a, b, pp].into_iter().try_fold(1usize, |p, f| p.checked_mul(*f));
        let written = stated.map_or(free.to_string(), |dp| dp.to_string());
        let verdict = match product {
            None => format!("the product of {a}, {b} and {pp} overflows"),
            Some(0) => "a size is 0".to_string(),
            Some(p) if !world.is_multiple_of(p) => format!("{free} = {world}/{p} is not whole"),
            Some(p) if stated.is_some_and(|dp| dp != world / p) => format!("{free} must be {}", world / p),
            Some(p) => format!("{free} = {}", world / p),
        };
        format!("{a}·{b}·{written}·{pp} = {world}: {verdict}")
    }
}

fn row(layout: &Layout, spec: &LayoutSpec) -> String {
    let (etp, dp) = (spec.etp.unwrap_or(layout.tp()), spec.dp.unwrap_or(layout.dp()));
    let sizes = [
        ("TP", spec.tp, layout.tp()),
        ("CP", spec.cp, layout.cp()),
        ("DP", dp, layout.dp()),
        ("PP", spec.pp, layout.pp()),
        ("ETP", etp, layout.etp()),
        ("EP", spec.ep, layout.ep()),
    ];
    let mut changed: Vec<String> = sizes
        .iter()
        .filter(|(_, before, after)| before != after)
        .map(|(name, before, after)| format!("{name} {before} -> {after}"))
        .collect();
    let order = layout.order().to_string();
    if !order.eq_ignore_ascii_case(&spec.order) {
        changed.push(format!("order \"{}\" -> {order}", spec.order));
    }
    let [tp, cp, dp, pp, etp, ep] = sizes.map(|(_, _, after)| after);
    format!(
        " {tp:>5}{cp:>5}{dp:>5}{pp:>5} |{etp:>5}{ep:>5}{:>5} | {order:<15} | {}",
        layout.edp(),
        changed.join(", ")
    )
}

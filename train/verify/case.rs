//! One case: a rule (nothing special, or a trap), a layout, a value of each factor; its name, which is the recipe to
//! make it again, and its settings.

use plica_folding::layout::{Layout, LayoutSpec};

use super::base::{EXPERT_FFN, EXPERTS, HEADS};
use super::factors::{self, Choices, FACTORS, SCHEDULE};
use super::rules::{RULES, Rule};

/// What a case compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A run in f64 with one rank, within the tolerance.
    OneRank,
    /// A run in f32 with the same run once more, bit by bit.
    Twice,
}

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What is compared.
    pub kind: Kind,
    /// Index of its rule.
    pub rule: usize,
    /// The layout.
    pub layout: Layout,
    /// Value of each factor.
    pub choices: Choices,
}

const TWICE: &str = "twice: ";

impl Case {
    /// The rule.
    pub fn rule(&self) -> &'static Rule {
        &RULES[self.rule]
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.layout.world()
    }

    /// Whether its ranks read each other's memory, which processes cannot.
    pub fn shares_memory(&self) -> bool {
        self.settings().iter().any(|setting| setting == "moe.dispatcher=direct")
    }

    /// The layout in words.
    pub fn layout_text(&self) -> String {
        layout_text(&self.layout)
    }

    /// Its name: rule, layout, and the words of what is not the default.
    pub fn name(&self) -> String {
        let mut parts = Vec::new();
        if !self.rule().name.is_empty() {
            parts.push(self.rule().name.to_string());
        }
        parts.push(self.layout_text());
        let defaults = self.rule().fixed(&self.layout, factors::defaults(&self.layout));
        for (factor, (own, default)) in self.choices.iter().zip(defaults).enumerate() {
            if *own != default {
                parts.push(FACTORS[factor].values[*own].word.to_string());
            }
        }
        let twice = if self.kind == Kind::Twice { TWICE } else { "" };
        format!("{twice}{}", parts.join(", "))
    }

    /// The case of a name; nothing where it is no name of a legal case.
    pub fn parse(name: &str) -> Option<Case> {
        let (kind, rest) = match name.strip_prefix(TWICE) {
            Some(rest) => (Kind::Twice, rest),
            None => (Kind::OneRank, name),
        };
        // Names of rules have commas too; the plain rule has an empty one and is tried last.
        let named = (1..RULES.count()).find_map(|rule| {
            let rest = rest.strip_prefix(RULES[rule].name)?.strip_prefix(", ")?;
            Some((rule, rest))
        });
        let (rule, rest) = named.unwrap_or((0, rest));
        let mut parts = rest.split(", ");
        let layout = parse_layout(parts.next()?, RULES[rule].order())?;
        let mut choices = RULES[rule].fixed(&layout, factors::defaults(&layout));
        for word in parts {
            let (factor, value) = factors::find(word)?;
            choices[factor] = value;
        }
        let case = Case { kind, rule, layout, choices };
        case.is_legal().then_some(case)
    }

    /// Whether layout, rule and choices fit each other.
    pub fn is_legal(&self) -> bool {
        let fits = |(factor, value): (usize, &usize)| (FACTORS[factor].values[*value].fits)(&self.layout);
        let rule = self.rule();
        divides(&self.layout, rule)
            && (rule.shows)(&self.layout)
            && self.choices.iter().enumerate().all(fits)
            && rule.fixed(&self.layout, self.choices) == self.choices
    }

    /// Settings of layout, factors and rule that must not change the mathematics.
    pub fn arrangement(&self) -> Vec<String> {
        let layout = &self.layout;
        let mut settings: Vec<String> = [
            ("ranks", layout.world()),
            ("tp", layout.tp()),
            ("cp", layout.cp()),
            ("dp", layout.dp()),
            ("pp", layout.pp()),
            ("ep", layout.ep()),
            ("etp", layout.etp()),
        ]
        .iter()
        .filter(|(name, size)| *size > 1 || ["ranks", "etp"].contains(name))
        .map(|(name, size)| format!("layout.{name}={size}"))
        .collect();
        settings.extend(self.rule().order().map(|order| format!("layout.order={order}")));
        settings.extend(self.factor_settings(false));
        if FACTORS[SCHEDULE].values[self.choices[SCHEDULE]].word == factors::ENDS {
            settings.push(format!("pipeline.layers={:?}", empty_ends(self.layers(), self.layout.pp())));
        }
        settings
    }

    /// Layers of the model: one more than stages where a stage is a rank, so that stages are uneven.
    fn layers(&self) -> usize {
        let (ranks, chunks) = (self.layout.pp(), factors::chunks(self.choices[SCHEDULE]));
        if chunks == 1 { ranks + 1 } else { ranks * chunks }
    }

    /// Settings that the one-rank run has too.
    pub fn mathematics(&self) -> Vec<String> {
        let mut settings = Vec::new();
        if self.layout.pp() > 1 {
            settings.push(format!("model.layers={}", self.layers()));
        }
        let batch = factors::global_batch(&self.layout);
        if batch != super::base::SEQUENCES {
            settings.push(format!("train.global_batch={batch}"));
        }
        settings.extend(self.factor_settings(true));
        settings.extend(self.rule().mathematics.iter().map(|s| s.to_string()));
        settings
    }

    fn factor_settings(&self, mathematics: bool) -> impl Iterator<Item = String> + '_ {
        // A model without experts has no dispatcher and drops nothing.
        let dense = self.rule().mathematics.contains(&"moe.experts=none");
        FACTORS
            .iter()
            .zip(self.choices)
            .filter(move |(factor, _)| factor.mathematics == mathematics)
            .flat_map(|(factor, value)| factor.values[value].settings)
            .filter(move |setting| !dense || !setting.starts_with("moe."))
            .map(|setting| setting.to_string())
    }

    /// All settings over the base.
    pub fn settings(&self) -> Vec<String> {
        let mut all = self.mathematics();
        all.extend(self.arrangement());
        all
    }
}

/// Layers of stages of which the first and, of more than two, the last have none.
fn empty_ends(layers: usize, stages: usize) -> Vec<usize> {
    let filled = (stages - 2).max(1);
    let mut counts = vec![0; stages];
    for (i, count) in counts.iter_mut().skip(usize::from(stages > 2)).take(filled).enumerate() {
        *count = layers / filled + usize::from(i < layers % filled);
    }
    counts
}

/// Whether the widths of the model divide over a layout.
pub fn divides(layout: &Layout, rule: &Rule) -> bool {
    let experts = if rule.mathematics.contains(&"moe.experts=16") { 16 } else { EXPERTS };
    let experts = if rule.mathematics.contains(&"moe.experts=4") { 4 } else { experts };
    HEADS.is_multiple_of(layout.tp())
        && experts.is_multiple_of(layout.ep())
        && EXPERT_FFN.is_multiple_of(layout.etp())
}

/// A layout in words.
pub fn layout_text(layout: &Layout) -> String {
    let attention = [("tp", layout.tp()), ("cp", layout.cp()), ("dp", layout.dp()), ("pp", layout.pp())];
    let experts = [("etp", layout.etp()), ("ep", layout.ep()), ("edp", layout.edp())];
    let text = |sizes: &[(&str, usize)]| {
        let shown = sizes.iter().filter(|(name, size)| *size > 1 || !["cp", "pp"].contains(name));
        shown.map(|(name, size)| format!("{name}{size}")).collect::<Vec<_>>().join(" ")
    };
    format!("{} | {}", text(&attention), text(&experts))
}

/// The layout of such words; sizes that are left out are 1, EDP follows.
fn parse_layout(text: &str, order: Option<&str>) -> Option<Layout> {
    if text.is_empty() {
        return None;
    }
    let mut spec = LayoutSpec { etp: Some(1), ..LayoutSpec::default() };
    let mut dp = 1;
    for part in text.split([' ', '|']).filter(|part| !part.is_empty()) {
        let digits = part.find(|c: char| c.is_ascii_digit())?;
        let size: usize = part[digits..].parse().ok()?;
        match &part[..digits] {
            "tp" => spec.tp = size,
            "cp" => spec.cp = size,
            "dp" => dp = size,
            "pp" => spec.pp = size,
            "etp" => spec.etp = Some(size),
            "ep" => spec.ep = size,
            "edp" => {}
            _ => return None,
        }
    }
    spec.world = [spec.tp, spec.cp, dp, spec.pp].iter().product();
    if let Some(order) = order {
        spec.order = order.to_string();
    }
    Layout::new(&spec).ok()
}

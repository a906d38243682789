//! What is wrong with a configuration: all mistakes of it, each with field, value, rule and remedy.

use plica_folding::LayoutError;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not TOML.
    #[error("configuration: not valid TOML: {0}")]
    Syntax(String),
    /// A name that no preset has.
    #[error("preset {name:?}: no such preset; {hint}")]
    UnknownPreset {
        /// The name as typed.
        name: String,
        /// The nearest name, and all names.
        hint: String,
    },
    /// A key that does not exist.
    #[error("{key}: no such field; {hint}")]
    UnknownKey {
        /// The dotted key as typed.
        key: String,
        /// The nearest key, or the valid ones of the section.
        hint: String,
    },
    /// An override that is not KEY=VALUE.
    #[error("--set {0}: write KEY=VALUE, for example --set train.lr=1e-3")]
    BadSet(String),
    /// A value that breaks a rule.
    #[error("{field} = {value}: {rule}; {remedy}")]
    Value {
        /// Dotted name of the field.
        field: String,
        /// The value as typed.
        value: String,
        /// The rule that it breaks.
        rule: String,
        /// What to write instead.
        remedy: String,
    },
    /// A rule of the parallel layout.
    #[error("layout: {0}")]
    Layout(LayoutError),
}

impl ConfigError {
    /// A value that breaks a rule.
    pub(super) fn value(
        field: &str,
        value: impl std::fmt::Display,
        rule: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        ConfigError::Value {
            field: field.into(),
            value: value.to_string(),
            rule: rule.into(),
            remedy: remedy.into(),
        }
    }
}

/// All mistakes of a configuration; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl std::fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.0.len();
        write!(f, "the configuration has {count} mistake{}:", if count == 1 { "" } else { "s" })?;
        self.0.iter().try_for_each(|error| write!(f, "\n  - {error}"))
    }
}

impl std::error::Error for ConfigErrors {}

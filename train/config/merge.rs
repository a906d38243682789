//! From texts to one complete table: defaults, then the preset, then the file, then each `--set`, every value checked
//! for its type where it comes in, all mistakes collected.

use toml::{Table, Value};

use super::error::ConfigError;
use super::fields::{self, Kind};
use super::low::LowConfig;
use super::nearest::nearest;

/// A table that is complete at every moment, and the mistakes seen so far.
pub(super) struct Merge {
    table: Table,
    pub(super) errors: Vec<ConfigError>,
}

impl Merge {
    pub(super) fn new() -> Self {
        Self { table: fields::defaults(), errors: Vec::new() }
    }

    /// Lays a TOML text over what is there.
    pub(super) fn text(&mut self, text: &str) {
        match text.trim_start_matches('\u{feff}').parse::<Table>() {
            Ok(table) => self.lay(&table, ""),
            Err(error) => self.errors.push(ConfigError::Syntax(error.to_string().trim_end().to_string())),
        }
    }

    /// Lays one `KEY=VALUE` over what is there.
    pub(super) fn set(&mut self, set: &str) {
        let Some((key, text)) = set.split_once('=') else {
            self.errors.push(ConfigError::BadSet(set.into()));
            return;
        };
        let (key, text) = (key.trim(), text.trim());
        let parsed = format!("value = {text}").parse::<Table>().ok();
        let parsed = parsed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
        let plain = || Value::String(text.into());
        match (fields::kind(key), parsed) {
            (None, Some(Value::Table(table))) if fields::is_section(key) => self.lay(&table, key),
            (Some(Kind::Text), Some(value)) if !value.is_str() => self.leaf(key, &plain()),
            (_, value) => self.leaf(key, &value.unwrap_or_else(plain)),
        }
    }

    /// The typed configuration, where no mistake was seen.
    pub(super) fn finish(mut self) -> Result<LowConfig, Vec<ConfigError>> {
        if self.errors.is_empty() {
            match self.table.try_into() {
                Ok(low) => return Ok(low),
                Err(error) => self.errors.push(ConfigError::Syntax(error.to_string())),
            }
        }
        Err(self.errors)
    }

    fn lay(&mut self, table: &Table, prefix: &str) {
        for (key, value) in table {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                Value::Table(inner) if fields::is_section(&name) => self.lay(inner, &name),
                _ => self.leaf(&name, value),
            }
        }
    }

    fn leaf(&mut self, name: &str, value: &Value) {
        let Some(kind) = fields::kind(name) else {
            self.errors.push(unknown(name));
            return;
        };
        match accept(kind, value) {
            Ok(value) => {
                let (sections, last) = name.rsplit_once('.').expect("a field stands in a section");
                let mut table = &mut self.table;
                for section in sections.split('.') {
                    table = table[section].as_table_mut().expect("sections of the defaults are tables");
                }
                table.insert(last.into(), value);
            }
            Err((rule, remedy)) => self.errors.push(ConfigError::value(name, value, rule, remedy)),
        }
    }
}

/// The error of an unknown key: the nearest one, else the keys of its section, else the sections.
fn unknown(name: &str) -> ConfigError {
    let names = || fields::FIELDS.iter().map(|(field, _, _)| *field);
    let section = name.rsplit_once('.').map_or(name, |(section, _)| section);
    let inside: Vec<&str> =
        names().filter_map(|field| field.strip_prefix(section)?.strip_prefix('.')).collect();
    let valid = if inside.is_empty() {
        "sections are run, model, moe, moe.capacity, layout, pipeline, train, data".to_string()
    } else {
        format!("fields of [{section}] are {}", inside.join(", "))
    };
    let hint = nearest(name, names()).map_or(valid.clone(), |near| format!("did you mean {near}? {valid}"));
    ConfigError::UnknownKey { key: name.into(), hint }
}

/// The value as it is stored, or the rule that it breaks and the remedy.
fn accept(kind: Kind, value: &Value) -> Result<Value, (String, String)> {
    let list = |inner: Kind, value: &Value| match value {
        Value::Array(values) => {
            let values: Result<Vec<Value>, _> = values.iter().map(|value| accept(inner, value)).collect();
            Some(values.map(Value::Array))
        }
        _ => None,
    };
    let word = |text: &str, wanted: &str| (text == wanted).then(|| Value::String(text.into()));
    let accepted = match (kind, value) {
        (Kind::Text | Kind::AutoText | Kind::NoneText, Value::String(text)) if text.is_empty() => {
            return Err(("it is empty".into(), format!("write {}", kind.text())));
        }
        (Kind::Text | Kind::AutoText | Kind::NoneText, Value::String(_)) => Some(value.clone()),
        (Kind::Flag, Value::Boolean(_)) => Some(value.clone()),
        (Kind::Count | Kind::AutoCount | Kind::NoneCount, Value::Integer(count)) if *count < 0 => {
            return Err(("it is negative".into(), "write 0 or more".into()));
        }
        (Kind::Count | Kind::AutoCount | Kind::NoneCount, Value::Integer(_)) => Some(value.clone()),
        (Kind::AutoCount, Value::String(text)) => word(text, "auto"),
        (Kind::NoneCount, Value::String(text)) => word(text, "none"),
        (Kind::Number | Kind::NumberOrNumbers, Value::Float(number)) => return finite(*number),
        (Kind::Number | Kind::NumberOrNumbers, Value::Integer(number)) => Some(Value::Float(*number as f64)),
        (Kind::Counts, _) => list(Kind::Count, value).transpose()?,
        (Kind::Numbers | Kind::NumberOrNumbers, _) => list(Kind::Number, value).transpose()?,
        (Kind::Word(words) | Kind::Words(words), Value::String(text)) => {
            if !words.contains(&text.as_str()) {
                let near = nearest(text, words.iter().copied());
                let hint = near.map_or(String::new(), |near| format!("did you mean \"{near}\"? "));
                return Err((format!("it must be {}", kind.text()), format!("{hint}write one of them")));
            }
            Some(value.clone())
        }
        (Kind::Words(words), _) => list(Kind::Word(words), value).transpose()?,
        (Kind::Factor, Value::String(text)) => Some(Value::String(text.trim().into())),
        (Kind::Factor, Value::Integer(number)) => Some(Value::String(number.to_string())),
        // The shortest decimal that reads back as the same f64 is what was typed, up to 15 digits.
        (Kind::Factor, Value::Float(number)) => {
            finite(*number)?;
            Some(Value::String(number.to_string()))
        }
        _ => None,
    };
    accepted.ok_or_else(|| {
        let rule = format!("it must be {}, not {}", kind.text(), article(value.type_str()));
        (rule, format!("write {}", kind.text()))
    })
}

fn finite(number: f64) -> Result<Value, (String, String)> {
    if number.is_finite() {
        Ok(Value::Float(number))
    } else {
        Err(("it must be a finite number".into(), "write a number such as 1e-3".into()))
    }
}

fn article(kind: &str) -> String {
    let vowel = kind.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {kind}", if vowel { "an" } else { "a" })
}

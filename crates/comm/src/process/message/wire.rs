//! Integers, texts and lists as bytes, and back with every length checked.

/// Bytes that are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::process) enum Malformed {
    /// The sender is another program.
    #[error("version {found} of the protocol, this program speaks {own}: start the same program everywhere")]
    Protocol {
        /// Its version.
        found: u8,
        /// The own one.
        own: u8,
    },
    /// What cannot be read.
    #[error("a message that cannot be read")]
    Content,
}

/// Appends fields.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn new(version: u8) -> Writer {
        Writer(vec![version])
    }

    pub(super) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn integer(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(super) fn integers(&mut self, values: &[u64]) {
        values.iter().for_each(|&v| self.integer(v));
    }

    pub(super) fn list(&mut self, values: &[usize]) {
        self.integer(values.len() as u64);
        values.iter().for_each(|&v| self.integer(v as u64));
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.integer(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// At most [`super::TEXT_BYTES`] of a text.
    pub(super) fn text(&mut self, text: &str) {
        let end = (0..=text.len().min(super::TEXT_BYTES)).rev().find(|&i| text.is_char_boundary(i));
        self.bytes(&text.as_bytes()[..end.unwrap_or(0)]);
    }

    pub(super) fn optional_text(&mut self, text: Option<&str>) {
        self.byte(u8::from(text.is_some()));
        if let Some(text) = text {
            self.text(text);
        }
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields off.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], own: u8) -> Result<Reader<'a>, Malformed> {
        match bytes.split_first() {
            Some((version, rest)) if *version == own => Ok(Reader(rest)),
            Some((found, _)) => Err(Malformed::Protocol { found: *found, own }),
            None => Err(Malformed::Content),
        }
    }

    pub(super) fn byte(&mut self) -> Result<u8, Malformed> {
        let (first, rest) = self.0.split_first().ok_or(Malformed::Content)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn integer(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed::Content)
    }

    pub(super) fn index(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.integer()?).map_err(|_| Malformed::Content)
    }

    pub(super) fn list(&mut self) -> Result<Vec<usize>, Malformed> {
        let len = self.index()?;
        if len > self.0.len() {
            return Err(Malformed::Content); // an entry takes a byte at least
        }
        (0..len).map(|_| self.index()).collect()
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.index()?;
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed::Content)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> Result<String, Malformed> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Malformed::Content)
    }

    pub(super) fn optional_text(&mut self) -> Result<Option<String>, Malformed> {
        Ok(if self.byte()? == 1 { Some(self.text()?) } else { None })
    }

    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Content) }
    }
}

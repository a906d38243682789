//! From the bytes of a file to the bytes of its documents: byte-order mark, line ends, JSONL records.

use std::path::Path;

use super::DataError;

/// The UTF-8 byte-order mark.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Removes a byte-order mark at the start and turns every `CR LF` into `LF`; all other bytes stay.
pub(crate) fn clean(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    if bytes.contains(&b'\r') {
        let mut kept = 0;
        for index in 0..bytes.len() {
            if bytes[index] == b'\r' && bytes.get(index + 1) == Some(&b'\n') {
                continue;
            }
            bytes[kept] = bytes[index];
            kept += 1;
        }
        bytes.truncate(kept);
    }
    bytes
}

/// Whether a folder's file looks binary: a zero byte in its first 8 KiB.
pub(crate) fn looks_binary(head: &[u8]) -> bool {
    head[..head.len().min(8192)].contains(&0)
}

/// The texts of a cleaned JSONL file: one document a line, the string under `field`. Empty lines and empty
/// strings are left out. `complete` says that the last line was not cut off by the size cap.
pub(crate) fn records(
    path: &Path,
    bytes: &[u8],
    field: &str,
    complete: bool,
) -> Result<Vec<Vec<u8>>, DataError> {
    let bad = |line: usize, reason: String| DataError::Record {
        path: path.to_path_buf(),
        line: line as u64 + 1,
        reason,
    };
    let mut texts = Vec::new();
    let lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').collect();
    let usable = if complete { lines.len() } else { lines.len().saturating_sub(1) };
    for (index, line) in lines[..usable].iter().enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let value: serde_json::Value = serde_json::from_slice(line)
            .map_err(|error| bad(index, format!("not a JSON record: {error}")))?;
        match value.get(field) {
            Some(serde_json::Value::String(text)) if text.is_empty() => {}
            Some(serde_json::Value::String(text)) => texts.push(clean(text.as_bytes().to_vec())),
            Some(_) => return Err(bad(index, format!("field {field:?} is not a string"))),
            None => {
                return Err(bad(
                    index,
                    format!("no field {field:?}; set data.field to the name of the text field"),
                ));
            }
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s29_mark_and_line_ends() {
        assert_eq!(clean(b"\xef\xbb\xbfa\r\nb".to_vec()), b"a\nb");
        assert_eq!(clean(b"a\rb\r".to_vec()), b"a\rb\r");
        assert_eq!(clean(b"\r\r\n\r\n".to_vec()), b"\r\n\n");
        assert_eq!(clean(b"a\xef\xbb\xbfb".to_vec()), b"a\xef\xbb\xbfb");
        assert_eq!(clean(b"\xef\xbb\xbf".to_vec()), b"");
        assert_eq!(clean(b"\xff\xfe\x80".to_vec()), b"\xff\xfe\x80");
    }

    #[test]
    fn s29_first_record_is_not_lost_and_line_ends_do_not_count() {
        let path = Path::new("x.jsonl");
        let unix = b"\xef\xbb\xbf{\"text\":\"one\"}\n{\"text\":\"two\"}\n".to_vec();
        let dos = b"\xef\xbb\xbf{\"text\":\"one\"}\r\n{\"text\":\"two\"}\r\n".to_vec();
        let want = vec![b"one".to_vec(), b"two".to_vec()];
        assert_eq!(records(path, &clean(unix), "text", true).unwrap(), want);
        assert_eq!(records(path, &clean(dos), "text", true).unwrap(), want);
    }

    #[test]
    fn bad_records_name_file_and_line() {
        let path = Path::new("x.jsonl");
        let text = |bytes: &[u8]| records(path, bytes, "text", true).unwrap_err().to_string();
        assert!(text(b"\n{\"text\": 3}").starts_with("\"x.jsonl\" line 2: field \"text\" is not a string"));
        assert!(text(b"{\"body\": \"a\"}").contains("line 1: no field \"text\""));
        assert!(text(b"{\"text\": \"a\"}\n{").contains("line 2: not a JSON record"));
        assert!(text(b"{\"text\": \"\xff\"}").contains("line 1: not a JSON record"));
        assert!(records(path, b"{\"text\": \"a\"}\n{\"te", "text", false).unwrap().len() == 1);
    }

    #[test]
    fn zero_bytes_mark_binary_files() {
        assert!(looks_binary(b"PNG\0\0"));
        assert!(!looks_binary("text with ümlaut".as_bytes()));
        assert!(!looks_binary(b""));
    }
}

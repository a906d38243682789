//! Which keys a query sees, as one run of rows per query, and the cut of the queries into segments that share no
//! key and blocks inside them. Both ends of the runs rise with the query, which everything here rests on.

use std::ops::Range;

use super::QUERY_ROWS;

/// Queries after which a segment may end.
const SEGMENT_ROWS: usize = 256;

/// What is asked of an attention call besides the tensors. Rows are counted over the whole packed sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec<'a> {
    /// Factor on the scores, usually 1 / sqrt(d).
    pub scale: f64,
    /// A query sees at most this many keys up to its own (`None`: all of its document).
    pub window: Option<usize>,
    /// First row of every document and, last, the number of rows; rising, first 0 (cu_seqlens). Empty documents
    /// are allowed.
    pub documents: &'a [usize],
    /// Row of the first query.
    pub query_offset: usize,
    /// Row of the first key.
    pub key_offset: usize,
}

impl<'a> AttentionSpec<'a> {
    /// All rows at once: causal inside every document.
    pub fn causal(scale: f64, documents: &'a [usize]) -> AttentionSpec<'a> {
        AttentionSpec { scale, window: None, documents, query_offset: 0, key_offset: 0 }
    }
}

/// Queries and keys that only see each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// The run of visible keys (local rows) of every query.
pub(super) struct Visibility {
    runs: Vec<Range<usize>>,
}

impl Visibility {
    /// # Panics
    /// When the documents are not rising, do not begin at 0 or end before the last query or key.
    pub fn new(spec: &AttentionSpec<'_>, queries: usize, keys: usize) -> Visibility {
        let documents = spec.documents;
        assert!(
            documents.first() == Some(&0) && documents.is_sorted(),
            "documents {documents:?} begin at 0 and rise"
        );
        assert_ne!(spec.window, Some(0), "a window of 0 sees nothing");
        let last = documents[documents.len() - 1];
        let (query_end, key_end) = (spec.query_offset + queries, spec.key_offset + keys);
        assert!(
            last >= query_end && last >= key_end,
            "documents end at {last}, rows at {query_end} and {key_end}"
        );
        let mut document = 0;
        let run = |row: usize| {
            while documents[document + 1] <= row {
                document += 1;
            }
            let first = documents[document].max((row + 1).saturating_sub(spec.window.unwrap_or(usize::MAX)));
            let local = |row: usize| row.clamp(spec.key_offset, key_end) - spec.key_offset;
            local(first)..local(row + 1)
        };
        Visibility { runs: (spec.query_offset..query_end).map(run).collect() }
    }

    /// Keys that query `query` sees.
    pub fn of(&self, query: usize) -> Range<usize> {
        self.runs[query].clone()
    }

    /// Keys that some of the queries see: from the lowest to the highest.
    pub fn keys_of(&self, queries: Range<usize>) -> Range<usize> {
        let mut seen = self.runs[queries].iter().filter(|run| !run.is_empty());
        match seen.next() {
            Some(first) => first.start..seen.next_back().unwrap_or(first).end,
            None => 0..0,
        }
    }

    /// Runs of queries, at least `SEGMENT_ROWS` long where possible, that share no key with another.
    pub fn segments(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut start = 0;
        for query in 1..=self.runs.len() {
            let ends = query == self.runs.len()
                || (query - start >= SEGMENT_ROWS && self.runs[query].start >= self.runs[query - 1].end);
            if ends {
                segments.push(Segment { queries: start..query, keys: self.keys_of(start..query) });
                start = query;
            }
        }
        segments
    }
}

impl Segment {
    /// Blocks of at most `QUERY_ROWS` queries.
    pub fn blocks(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        let end = self.queries.end;
        self.queries.clone().step_by(QUERY_ROWS).map(move |first| first..(first + QUERY_ROWS).min(end))
    }
}

/// The common part of two runs; an empty one lies inside `b` too.
pub(super) fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}

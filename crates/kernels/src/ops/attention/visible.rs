//! Which keys a query sees, as one run of rows per query, and the cut of the queries into segments that share no
//! key and blocks inside them. Both ends of the runs rise with the query, which everything here rests on.

use std::ops::Range;

use super::QUERY_ROWS;

/// Queries after which a segment may end.
const SEGMENT_ROWS: usize = 256;

/// Which rows of the whole packed sequence the rows of a tensor are; they rise from row to row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rows<'a> {
    /// One run that begins here.
    From(usize),
    /// Several runs, rising and apart from each other, as long together as the tensor has rows: the chunks of a
    /// context-parallel rank.
    Runs(&'a [Range<usize>]),
}

impl Rows<'_> {
    /// # Panics
    /// When the runs do not rise or have another number of rows.
    fn check(&self, count: usize) {
        if let Rows::Runs(runs) = self {
            assert!(runs.is_sorted_by(|a, b| a.end <= b.start), "runs {runs:?} rise and do not overlap");
            assert_eq!(runs.iter().map(Range::len).sum::<usize>(), count, "rows of the runs {runs:?}");
        }
    }

    /// Every row in turn.
    fn each(&self, count: usize) -> impl Iterator<Item = usize> {
        let one = match self {
            Rows::From(first) => *first..first + count,
            Rows::Runs(_) => 0..0,
        };
        let many = match self {
            Rows::From(_) => &[][..],
            Rows::Runs(runs) => runs,
        };
        one.chain(many.iter().cloned().flatten())
    }

    /// First row behind all of them.
    fn end(&self, count: usize) -> usize {
        match self {
            Rows::From(first) => first + count,
            Rows::Runs(runs) => runs.last().map_or(0, |run| run.end),
        }
    }
}

/// How many of the rows lie below a row of the whole sequence.
struct Below<'a> {
    rows: Rows<'a>,
    count: usize,
    /// Rows before each run.
    before: Vec<usize>,
}

impl<'a> Below<'a> {
    fn new(rows: Rows<'a>, count: usize) -> Below<'a> {
        let mut before = Vec::new();
        if let Rows::Runs(runs) = rows {
            let mut sum = 0;
            for run in runs {
                before.push(sum);
                sum += run.len();
            }
        }
        Below { rows, count, before }
    }

    fn of(&self, row: usize) -> usize {
        match self.rows {
            Rows::From(first) => row.clamp(first, first + self.count) - first,
            Rows::Runs(runs) => match runs.partition_point(|run| run.start < row) {
                0 => 0,
                after => self.before[after - 1] + row.min(runs[after - 1].end) - runs[after - 1].start,
            },
        }
    }
}

/// What is asked of an attention call besides the tensors. Rows are counted over the whole packed sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec<'a> {
    /// Factor on the scores, usually 1 / sqrt(d).
    pub scale: f64,
    /// A query sees at most this many rows up to its own (`None`: all of its document).
    pub window: Option<usize>,
    /// First row of every document and, last, the number of rows; rising, first 0 (cu_seqlens). Empty documents
    /// are allowed.
    pub documents: &'a [usize],
    /// Which rows the queries are.
    pub queries: Rows<'a>,
    /// Which rows the keys are.
    pub keys: Rows<'a>,
}

impl<'a> AttentionSpec<'a> {
    /// All rows at once: causal inside every document.
    pub fn causal(scale: f64, documents: &'a [usize]) -> AttentionSpec<'a> {
        AttentionSpec { scale, window: None, documents, queries: Rows::From(0), keys: Rows::From(0) }
    }

    /// Pairs of a query and a key that it sees, a head: the work that a call with so many queries and keys does,
    /// counted on the same table as the call uses.
    ///
    /// # Panics
    /// When the documents do not fit the rows.
    pub fn visible_pairs(&self, queries: usize, keys: usize) -> u64 {
        Visibility::new(self, queries, keys).runs.iter().map(|run| run.len() as u64).sum()
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
        spec.queries.check(queries);
        spec.keys.check(keys);
        let last = documents[documents.len() - 1];
        let (query_end, key_end) = (spec.queries.end(queries), spec.keys.end(keys));
        assert!(
            last >= query_end && last >= key_end,
            "documents end at {last}, rows at {query_end} and {key_end}"
        );
        let below = Below::new(spec.keys, keys);
        let mut document = 0;
        let run = |row: usize| {
            while documents[document + 1] <= row {
                document += 1;
            }
            let first = documents[document].max((row + 1).saturating_sub(spec.window.unwrap_or(usize::MAX)));
            below.of(first)..below.of(row + 1)
        };
        Visibility { runs: spec.queries.each(queries).map(run).collect() }
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

    /// For every `tile` keys (the last may be fewer) the run of queries that see some of them; it may hold queries
    /// without keys.
    pub fn spans(&self, keys: usize, tile: usize) -> Vec<Range<usize>> {
        let span = |first: usize| {
            let end = self.runs.partition_point(|run| run.start < first + tile);
            self.runs.partition_point(|run| run.end <= first).min(end)..end
        };
        (0..keys).step_by(tile).map(span).collect()
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

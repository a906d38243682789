//! The word nearest to a mistyped one, by the number of letters changed, left out, added or swapped.

/// The optimal string alignment distance of two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    (0..=a.len()).for_each(|i| rows[i][0] = i);
    (0..=b.len()).for_each(|j| rows[0][j] = j);
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            rows[i][j] = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                rows[i][j] = rows[i][j].min(rows[i - 2][j - 2] + 1);
            }
        }
    }
    rows[a.len()][b.len()]
}

/// The nearest of `words`, unless even that one is far off. Two dotted names are also near where only their sections
/// differ.
pub(super) fn nearest<'a>(typed: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Nobody types a name of this length by mistake, and the distance costs its square.
    if typed.len() > 80 {
        return None;
    }
    let typed = typed.to_lowercase();
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
    let score = |word: &str| {
        let whole = distance(&typed, word);
        let same_end = word.contains('.') && distance(&last(&typed), &last(word)) == 0;
        if same_end { whole.min(2) } else { whole }
    };
    let (best, word) = words.into_iter().map(|word| (score(word), word)).min_by_key(|(score, _)| *score)?;
    (best <= (typed.chars().count() / 3).max(2)).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, want) in
            [("", "", 0), ("abc", "abc", 0), ("abc", "acb", 1), ("kitten", "sitting", 3), ("", "ab", 2)]
        {
            assert_eq!(distance(a, b), want, "{a} {b}");
            assert_eq!(distance(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let words = ["moe.top_k", "moe.experts", "train.lr", "layout.tp"];
        assert_eq!(nearest("moe.topk", words), Some("moe.top_k"));
        assert_eq!(nearest("model.experts", words), Some("moe.experts"));
        assert_eq!(nearest("top_k", words), Some("moe.top_k"));
        assert_eq!(nearest("MOE.EXPERT", words), Some("moe.experts"));
        assert_eq!(nearest("something.else.entirely", words), None);
        assert_eq!(nearest(&"x".repeat(1000), words), None);
        assert_eq!(nearest("a", []), None);
    }
}

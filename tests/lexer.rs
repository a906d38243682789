//! Just enough of the language's lexical rules for the tidy tests: blanking of comments and literals, and the
//! length of functions by matching braces.

/// The source with comments, strings and character literals replaced by spaces; lines keep their numbers.
pub fn blank(source: &str) -> String {
    let s: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut i = 0;
    while i < s.len() {
        let end = skip(&s, i);
        if end == i {
            out.push(s[i]);
            i += 1;
        } else {
            out.extend(s[i..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            i = end;
        }
    }
    out
}

/// Where the comment or literal that starts at `i` ends; `i` when none does.
fn skip(s: &[char], i: usize) -> usize {
    let at = |j: usize| s.get(j).copied().unwrap_or('\0');
    let word = |c: char| c.is_alphanumeric() || c == '_';
    match at(i) {
        '/' if at(i + 1) == '/' => (i..s.len()).find(|j| s[*j] == '\n').unwrap_or(s.len()),
        '/' if at(i + 1) == '*' => {
            (i + 2..s.len()).find(|j| s[*j] == '*' && at(j + 1) == '/').map_or(s.len(), |j| j + 2)
        }
        'r' if (i == 0 || !word(s[i - 1])) && matches!(at(i + 1), '"' | '#') => {
            let hashes = (i + 1..s.len()).take_while(|j| s[*j] == '#').count();
            if at(i + 1 + hashes) != '"' {
                return i;
            }
            let closes = |j: usize| s[j] == '"' && (1..=hashes).all(|k| at(j + k) == '#');
            (i + 2 + hashes..s.len()).find(|j| closes(*j)).map_or(s.len(), |j| j + 1 + hashes)
        }
        '"' => {
            let mut j = i + 1;
            while j < s.len() && s[j] != '"' {
                j += if s[j] == '\\' { 2 } else { 1 };
            }
            (j + 1).min(s.len())
        }
        '\'' if at(i + 1) == '\\' => (i + 3..s.len()).find(|j| s[*j] == '\'').map_or(s.len(), |j| j + 1),
        '\'' if at(i + 2) == '\'' => i + 3,
        _ => i,
    }
}

/// Name and length in lines (signature to closing brace) of every function in blanked source.
pub fn functions(code: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for (start, _) in code.match_indices("fn ") {
        let before = code[..start].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[start + 3..];
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let mut nesting = 0;
        let body = rest.char_indices().find(|(_, c)| {
            nesting += i32::from(matches!(c, '(' | '[')) - i32::from(matches!(c, ')' | ']'));
            nesting == 0 && matches!(c, '{' | ';')
        });
        let Some((body, '{')) = body else { continue };
        if name.is_empty() {
            continue;
        }
        let mut depth = 0;
        for (i, c) in rest[body..].char_indices() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if depth == 0 {
                found.push((name, rest[..=body + i].lines().count()));
                break;
            }
        }
    }
    found
}

#[test]
fn lexer_sees_through_literals() {
    let code =
        blank("fn a() {\n  let s = \"}\"; // }\n  let c = '}'; let r = r#\"}\"#;\n}\nfn b(x: [u8; 2]);\n");
    assert_eq!(code.lines().count(), 5);
    assert_eq!(functions(&code), [("a".to_string(), 4)]);
    assert_eq!(functions(&blank("fn f<'a>(x: &'a str) -> char {\n '\\''\n}\n")), [("f".to_string(), 3)]);
}

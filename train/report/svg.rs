//! A minimal writer of SVG: escaped text, lines, rectangles, one style for all pictures.

/// Colours of series, readable on white and for most colour-blind people (after Okabe and Ito, 2008).
pub(crate) const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// Where text is anchored.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture under construction; lengths in pixels, y grows downwards.
pub(crate) struct Svg {
    body: String,
    width: f64,
    height: f64,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Self {
        Self { body: String::new(), width, height }
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str) {
        self.body.push_str(&format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>\n",
            from.0, from.1, to.0, to.1
        ));
    }

    pub fn polyline(&mut self, points: &[(f64, f64)], colour: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.body.push_str(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" \
             stroke-linejoin=\"round\"/>\n",
            points.join(" ")
        ));
    }

    pub fn circle(&mut self, at: (f64, f64), radius: f64, colour: &str) {
        self.body.push_str(&format!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius:.1}\" fill=\"{colour}\"/>\n",
            at.0, at.1
        ));
    }

    /// A filled rectangle; a title is shown by browsers when the pointer rests on it.
    pub fn rect(&mut self, at: (f64, f64), size: (f64, f64), colour: &str, title: &str) {
        self.body.push_str(&format!(
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"",
            at.0, at.1, size.0, size.1
        ));
        if title.is_empty() {
            self.body.push_str("/>\n");
        } else {
            self.body.push_str(&format!("><title>{}</title></rect>\n", escape(title)));
        }
    }

    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.body.push_str(&format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{}</text>\n",
            at.0,
            at.1,
            escape(text)
        ));
    }

    /// The whole document.
    pub fn finish(self) -> String {
        let (width, height) = (self.width, self.height);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\">\n<style>text{{font:12px sans-serif;fill:#333}}\
             .title{{font:bold 15px sans-serif;fill:#111}}.small{{font-size:11px;fill:#555}}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Text as XML text: markup characters are escaped, characters that XML forbids are left out.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b & \"c\">\u{1}"), "a&lt;b &amp; &quot;c&quot;&gt;");
        let mut svg = Svg::new(10.0, 5.0);
        svg.rect((1.0, 2.0), (3.0, 4.0), "#fff", "x<y");
        svg.text((1.0, 1.0), Anchor::End, "small", "t");
        let text = svg.finish();
        assert!(text.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"10\" height=\"5\""));
        assert!(text.contains("<title>x&lt;y</title></rect>"));
        assert!(text.contains("text-anchor=\"end\" class=\"small\">t</text>"));
    }
}

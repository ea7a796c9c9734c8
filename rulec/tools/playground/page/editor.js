// The editor of a rule, and the viewer of its kernel.
import {
  EditorState, EditorView, StreamLanguage, autocompletion, bracketMatching, c, classHighlighter, completionKeymap, cpp,
  Compartment, defaultKeymap, drawSelection, history, historyKeymap, hoverTooltip, keymap, lineNumbers, lintGutter,
  lintKeymap, python, setDiagnostics, syntaxHighlighting,
} from "./codemirror.js";
import { element, marked } from "./ask.js";

const WORDS = new Set(["if", "elif", "else", "for", "in", "and", "or", "not", "range"]);

// Keys and values of YAML; below `key: |` the language of steps.
const rule = StreamLanguage.define({
  name: "rule",
  startState: () => ({ block: -1 }),
  token(stream, state) {
    if (stream.sol()) {
      if (state.block >= 0 && stream.indentation() <= state.block && !/^\s*$/.test(stream.string)) state.block = -1;
      const key = /^(\s*)[\w-]+:\s*[|>][-+\d]*\s*$/.exec(stream.string);
      if (state.block < 0 && key) state.block = key[1].length;
    }
    if (stream.eatSpace()) return null;
    if (stream.match(/^#.*/)) return "comment";
    if (stream.match(/^[A-Za-z_][\w-]*(?=\s*:(\s|$))/)) return "propertyName";
    if (stream.match(/^"([^"\\]|\\.)*"?/) || stream.match(/^'[^']*'?/)) return "string";
    if (stream.match(/^(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?/)) return "number";
    if (stream.match(/^[A-Za-z_][\w.]*(?=\()/)) return "typeName";
    if (stream.match(/^[A-Za-z_]\w*/)) return state.block >= 0 && WORDS.has(stream.current()) ? "keyword" : null;
    stream.next();
    return "operator";
  },
  languageData: { commentTokens: { line: "#" } },
});

// Labels, mnemonics, registers and numbers of machine code.
const assembly = StreamLanguage.define({
  name: "assembly",
  token(stream) {
    const first = stream.sol();
    if (stream.eatSpace()) return null;
    if (first && stream.match(/^[.\w$]+:$/)) return "propertyName";
    if (stream.column() === 4 && stream.match(/^[a-z][\w.]*( [a-z]\w+)?/)) return "typeName";
    if (stream.match(/^#?-?\d\w*/)) return "number";
    if (stream.match(/^\.?[A-Za-z_][\w.]*/)) return /^(BYTE|[DQ]?WORD|[XYZ]MMWORD|PTR)$/i.test(stream.current()) ? "keyword" : null;
    stream.next();
    return "operator";
  },
});

const CODE = { assembly, c: StreamLanguage.define(c), cuda: StreamLanguage.define(cpp), python: StreamLanguage.define(python) };

// Columns of the server count characters; those of the browser count units of UTF-16.
const units = (line, column) => [...line].slice(0, column).join("").length;
const characters = (line, column) => [...line.slice(0, column)].length;

export function makeEditor(parent, { text, changed, ask }) {
  const place = (state, at) => {
    const line = state.doc.lineAt(at);
    return { text: state.doc.toString(), line: line.number - 1, column: characters(line.text, at - line.from) };
  };

  async function complete(context) {
    const word = context.matchBefore(/\w*/);
    if (word.from === word.to && !context.explicit) return null;
    const { answer } = await ask("words", place(context.state, context.pos));
    const options = (answer ?? []).map(({ name, kind, meaning }) => ({
      label: name, detail: kind, info: () => prose(meaning), type: kind === "hyper-parameter" ? "constant" : kind,
    }));
    return { from: word.from, options, validFor: /^\w*$/ };
  }

  async function hover(view, at) {
    const { answer } = await ask("meaning", place(view.state, at));
    return answer ? { pos: at, above: true, create: () => ({ dom: prose(answer.meaning) }) } : null;
  }

  const view = new EditorView({
    parent,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(), history(), drawSelection(), bracketMatching(), lintGutter(), rule, syntaxHighlighting(classHighlighter),
        autocompletion({ override: [complete], icons: false, selectOnOpen: false }), hoverTooltip(hover),
        keymap.of([...completionKeymap, ...lintKeymap, ...historyKeymap, ...defaultKeymap]),
        EditorView.contentAttributes.of({ "aria-label": "The text of the rule", tabindex: "0", spellcheck: "false", autocapitalize: "off" }),
        EditorView.updateListener.of((update) => { if (update.docChanged) changed(); }),
      ],
    }),
  });

  const diagnostic = ({ message, line, column, width, warning }) => {
    const at = view.state.doc.line(Math.min(line + 1, view.state.doc.lines));
    const from = Math.min(at.from + units(at.text, column), at.to);
    const to = Math.min(at.from + units(at.text, column + width), at.to);
    return { from, to: Math.max(from, to), severity: warning ? "warning" : "error", message };
  };
  return {
    text: () => view.state.doc.toString(),
    replace: (content) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: content } }),
    mark: (mistakes) => view.dispatch(setDiagnostics(view.state, mistakes.map(diagnostic))),
    go: (mistake) => {
      const { from, to } = diagnostic(mistake);
      view.dispatch({ selection: { anchor: from, head: to }, scrollIntoView: true });
      view.focus();
    },
  };
}

export function makeViewer(parent, name) {
  const language = new Compartment();
  const view = new EditorView({
    parent,
    state: EditorState.create({
      extensions: [
        lineNumbers(), language.of([]), syntaxHighlighting(classHighlighter), EditorState.readOnly.of(true),
        EditorView.editable.of(false), EditorView.contentAttributes.of({ tabindex: "0", role: "textbox", "aria-readonly": "true", "aria-label": name, "aria-multiline": "true" }),
        keymap.of(defaultKeymap),
      ],
    }),
  });
  return (text, kind) => view.dispatch({
    changes: { from: 0, to: view.state.doc.length, insert: text }, effects: language.reconfigure(CODE[kind] ?? []),
    scrollIntoView: false, selection: { anchor: 0 },
  });
}

// The little Markdown of a word's meaning: blocks between fences, `code` and **names**.
function prose(markdown) {
  const box = element("div", { class: "meaning" });
  for (const [index, part] of markdown.split(/```\w*\n?/).entries()) {
    if (index % 2) box.append(element("pre", {}, part.trimEnd()));
    else if (part.trim()) box.append(element("p", {}, ...marked(part.trim())));
  }
  return box;
}

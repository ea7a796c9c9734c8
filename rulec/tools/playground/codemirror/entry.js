// The parts of CodeMirror that the playground uses.
export { autocompletion, completionKeymap } from "@codemirror/autocomplete";
export { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
export { StreamLanguage, bracketMatching, syntaxHighlighting } from "@codemirror/language";
export { c, cpp } from "@codemirror/legacy-modes/mode/clike";
export { python } from "@codemirror/legacy-modes/mode/python";
export { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
export { EditorState, Compartment } from "@codemirror/state";
export { EditorView, drawSelection, hoverTooltip, keymap, lineNumbers } from "@codemirror/view";
export { classHighlighter } from "@lezer/highlight";

// Links that hold a rule: #rule=TEXT, the rule compressed (deflate, without a header) and in base64 for addresses.
// The first words behind # may be the server's key: #KEY&rule=TEXT.

const LONGEST = 400000; // bytes of a rule file
const PROBLEM = "The link holds no whole rule: copy all of it again. The page shows the rule that it opens with.";

const part = (hash) => /^#(?:([\w-]+)&)?rule=(.*)$/.exec(hash);

// The server's key in an address; null where there is none.
export const keyOf = (hash) => (part(hash) ? part(hash)[1] : hash.slice(1)) || null;

// The link to this page with a text.
export async function linkTo(text) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(text));
  const base64 = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return `${location.origin}${location.pathname}#rule=${base64}`;
}

// The text that an address holds, as {text} or {problem}; null for an address without a rule.
export async function linked(hash) {
  if (!part(hash)) return null;
  try {
    const letters = atob(part(hash)[2].replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
    return { text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) };
  } catch {
    return { problem: PROBLEM };
  }
}

// Bytes through a stream that compresses or expands them; an error for more than a rule file has.
async function through(stream, bytes) {
  const parts = [], reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  for (let length = 0; ; ) {
    const { value, done } = await reader.read();
    if (done) break;
    parts.push(value);
    length += value.length;
    if (length > LONGEST) throw new RangeError("too long");
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

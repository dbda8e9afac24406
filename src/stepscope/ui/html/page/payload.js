// A data block: base64, deflate, a JSON head, then columns of transposed bytes (payload.py).

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
function fromBase64(text) {
  if ("fromBase64" in Uint8Array) return /** @type {any} */ (Uint8Array).fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflate(/** @type {Uint8Array<ArrayBuffer>} */ bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @param {Uint8Array} bytes @param {number} offset @param {number} length @param {number} width in bytes */
function readColumn(bytes, offset, length, width) {
  const kind = width <= 1 ? Uint8Array : width <= 4 ? Uint32Array : Float64Array;
  const column = new kind(length);
  for (let k = 0; k < width; k++) {
    const scale = 256 ** k;
    const plane = offset + k * length;
    for (let i = 0; i < length; i++) column[i] += bytes[plane + i] * scale;
  }
  return column;
}

/** @param {Uint8Array} bytes @param {number} offset @param {[string, number, number][]} listed name, length, width */
function readColumns(bytes, offset, listed) {
  const columns = /** @type {Columns} */ ({});
  for (const [name, length, width] of listed) {
    columns[name] = readColumn(bytes, offset, length, width);
    offset += length * width;
  }
  return columns;
}

/** @param {string} text @returns {Promise<any>} */
export async function decodeBlock(text) {
  const bytes = await inflate(fromBase64(text.trim()));
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  return { ...head, columns: readColumns(bytes, 4 + size, head.columns) };
}

export const unpackProblem = (/** @type {unknown} */ error) =>
  `This browser could not unpack the report's data (${error instanceof Error ? error.message : error}).`;

/** 0, 1, 2, 3 as 0, -1, 1, -2. @param {number} value */
export const unzigzag = (value) => (value % 2 ? -(value + 1) / 2 : value / 2);

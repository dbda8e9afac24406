// A rank's data block: base64, deflate, a JSON head, then columns of transposed bytes.

const Payload = (() => {
  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return bytes;
  }

  async function inflate(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function column(bytes, offset, length, width) {
    const kind = width <= 1 ? Uint8Array : width <= 4 ? Uint32Array : Float64Array;
    const out = new kind(length);
    for (let k = 0; k < width; k++) {
      const scale = 256 ** k;
      const plane = offset + k * length;
      for (let i = 0; i < length; i++) out[i] += bytes[plane + i] * scale;
    }
    return out;
  }

  function columns(bytes, offset, listed) {
    const out = {};
    for (const [name, length, width] of listed) {
      out[name] = column(bytes, offset, length, width);
      offset += length * width;
    }
    return out;
  }

  async function load(element) {
    const bytes = await inflate(fromBase64(element.textContent.trim()));
    const size = new DataView(bytes.buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    return { ...head, columns: columns(bytes, 4 + size, head.columns) };
  }

  const unzigzag = (value) => (value % 2 ? -(value + 1) / 2 : value / 2);

  return { load, unzigzag };
})();

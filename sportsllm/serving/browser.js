// Answers the page's requests in the browser itself, for `export --format web`: transformers.js beside the page runs the
// model that lies there.
import { env, InterruptableStoppingCriteria, pipeline, TextStreamer } from "./lib/transformers.min.js";

env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = "./";
env.backends.onnx.wasm.wasmPaths = new URL("./lib/", location.href).href;

const SUPPORTED = ["temperature", "top_k", "top_p", "repetition_penalty", "max_tokens", "system"];
const DEFAULTS = { temperature: 0.7, top_k: 50, top_p: 0.9, repetition_penalty: 1 };
const name = decodeURIComponent(location.pathname.split("/").at(-2)) || "model";
let device = "WebAssembly";
const loaded = load();

async function load() {
  const wanted = new URLSearchParams(location.search).get("device");
  const adapter = wanted === "wasm" ? null : await navigator.gpu?.requestAdapter().catch(() => null);
  if (adapter && (wanted === "webgpu" || !adapter.info?.isFallbackAdapter)) {  // software is slower than WebAssembly
    try {
      (await adapter.requestDevice()).destroy();  // ONNX Runtime would wait for ever if there were none
      const model = await pipeline("text-generation", ".", { device: "webgpu" });
      device = "WebGPU";
      return model;
    } catch (error) {
      device = `WebAssembly, as WebGPU fails: ${error.message}`;
    }
  } else {
    env.backends.onnx.wasm.proxy = true;  // a thread of its own: the page stays awake
  }
  return pipeline("text-generation", ".", { device: "wasm" });
}

function generate(model, chat, { messages, prompt, max_tokens = 256, temperature = DEFAULTS.temperature, ...more }, signal) {
  const stopper = new InterruptableStoppingCriteria(), encoder = new TextEncoder();
  const settings = { ...DEFAULTS, ...more, max_new_tokens: max_tokens, do_sample: temperature > 0 };
  if (temperature > 0) settings.temperature = temperature;
  let tokens = 0, first = 0;
  return new ReadableStream({
    async start(stream) {
      const send = (data) => stream.enqueue(encoder.encode(`data: ${JSON.stringify(data)}\n\n`));
      signal.onabort = () => {
        stopper.interrupt();
        stream.error(new DOMException("", "AbortError"));
      };
      const piece = (text) => !signal.aborted && send({ choices: [chat ? { delta: { content: text } } : { text }] });
      const streamer = new TextStreamer(model.tokenizer, {
        skip_prompt: true, skip_special_tokens: true, callback_function: piece,
        token_callback_function: () => { first ||= performance.now(); tokens += 1; },
      });
      try {
        await model(chat ? messages : prompt, { ...settings, add_special_tokens: !chat, streamer, stopping_criteria: stopper });
        const rate = (tokens - 1) / Math.max(performance.now() - first, 1) * 1e3;
        if (!signal.aborted) send({ choices: [], usage: { completion_tokens: tokens }, timings: { predicted_per_second: rate } });
      } catch (error) {
        if (!signal.aborted) send({ error: { message: error.message } });
      }
      if (!signal.aborted) {
        stream.enqueue(encoder.encode("data: [DONE]\n\n"));
        stream.close();
      }
    },
  });
}

window.local = async (path, { body, signal }) => {
  const model = await loaded;
  if (path === "v1/models") return Response.json({ data: [{ id: name }] });
  const { chat_template } = model.tokenizer;
  if (path.startsWith("props")) return Response.json({ device, chat_template, default_generation_settings: { params: DEFAULTS } });
  return new Response(generate(model, path.includes("chat"), JSON.parse(body), signal));
};

for (const field of document.querySelectorAll(".settings input, .settings textarea")) {
  field.closest("label").hidden = !SUPPORTED.includes(field.id);
}
await window.start();
const canChat = await loaded.then((model) => !!model.tokenizer.chat_template, () => true);
document.querySelector("[value=chat]").disabled = !canChat;

// Streams one answer from a Paceline server.
//
//   npm ci
//   node generate.mjs [--address 127.0.0.1:50051] "What is the capital of France?"
//
// The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const { address, prompt } = readArguments();

// The protos are read as they are; nothing is generated.
const definition = protoLoader.loadSync("paceline/v1/inference.proto", {
  includeDirs: [fileURLToPath(new URL("../../protos", import.meta.url))],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true, // an empty text is "", not undefined
});
const { InferenceService } = grpc.loadPackageDefinition(definition).paceline.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
const key = process.env.PACELINE_API_KEY;
if (key) metadata.set("authorization", `Bearer ${key}`);

const request = {
  chat: { messages: [{ role: "user", content: prompt }] },
  sampling: { temperature: 0 },
  stopping: { max_tokens: 100 },
};
const call = client.Generate(request, metadata, { deadline: Date.now() + 120_000 });

// `response.event` names the field that is set: accepted, prefill_done, delta, progress, migrated or finish.
call.on("data", (response) => {
  if (response.event === "delta") process.stdout.write(response.delta.text);
  if (response.event === "finish") showFinish(response.finish);
});
call.on("error", (error) => {
  process.exitCode = error.code === grpc.status.CANCELLED ? 130 : 1;
  if (error.code === grpc.status.CANCELLED) console.error("\ncancelled");
  else showRefusal(error);
});
process.once("SIGINT", () => call.cancel());

function readArguments() {
  try {
    const options = { address: { type: "string", default: "127.0.0.1:50051" } };
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    if (positionals.length === 1) return { address: values.address ?? options.address.default, prompt: positionals[0] };
  } catch (error) {
    console.error(error.message);
  }
  console.error("usage: node generate.mjs [--address HOST:PORT] PROMPT");
  process.exit(2);
}

function showFinish({ reason, usage, timeline }) {
  const workers = `${timeline.prefill_worker} -> ${timeline.decode_worker}`;
  console.error(`\n${reason}: ${usage.output_tokens} tokens, ${usage.cached_tokens} cached, ${workers}`);
}

// What the server tells about a refusal: google.rpc.Status, which holds an ErrorInfo, and a RetryInfo where a retry helps.
function showRefusal(error) {
  console.error(`error: ${error.details}`);
  const [status] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (status === undefined) return;
  const types = protobuf.loadSync(fileURLToPath(new URL("../protos/google/rpc/refusal.proto", import.meta.url)));
  for (const { type_url, value } of types.lookupType("google.rpc.Status").decode(status).details) {
    const detail = types.lookupType(type_url.split("/").pop()).decode(value);
    if (type_url.endsWith("/google.rpc.ErrorInfo")) {
      console.error(`  reason: ${detail.reason}`);
      for (const [name, fact] of Object.entries(detail.metadata)) console.error(`  ${name}: ${fact}`);
    }
    if (type_url.endsWith("/google.rpc.RetryInfo")) {
      const seconds = Number(detail.retryDelay.seconds) + detail.retryDelay.nanos / 1e9;
      console.error(`  retry after: ${seconds.toFixed(1)} s`);
    }
  }
}

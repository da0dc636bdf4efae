// Streams one answer from a Paceline server.
//
//   npm ci
//   node generate.mjs "What is the capital of France?" [127.0.0.1:50051]
//
// Ctrl-C ends the call, which cancels the request on the server.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [prompt, address = "127.0.0.1:50051"] = process.argv.slice(2);
if (prompt === undefined) {
  console.error('usage: node generate.mjs "PROMPT" [HOST:PORT]');
  process.exit(2);
}

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

const request = {
  chat: { messages: [{ role: "user", content: prompt }] },
  sampling: { temperature: 0 },
  stopping: { max_tokens: 100 },
};
const call = client.Generate(request, { deadline: Date.now() + 120_000 });

// `response.event` names the field that is set: accepted, prefill_done, delta, progress, migrated or finish.
call.on("data", (response) => {
  if (response.event === "delta") process.stdout.write(response.delta.text);
  if (response.event === "finish") report(response.finish);
});
call.on("error", (error) => {
  console.error(`error: ${error.details} (${grpc.status[error.code]})`);
  process.exitCode = 1;
});
process.once("SIGINT", () => call.cancel());

function report({ reason, usage, timeline }) {
  const workers = `${timeline.prefill_worker} -> ${timeline.decode_worker}`;
  console.error(`\n${reason}: ${usage.output_tokens} tokens, ${usage.cached_tokens} cached, ${workers}`);
}

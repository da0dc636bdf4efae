// Streams one answer from a Paceline server.
//
//   ./build
//   out/generate [--address 127.0.0.1:50051] "What is the capital of France?"
//
// The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "google/rpc/refusal.pb.h"
#include "paceline/v1/inference.grpc.pb.h"

using paceline::v1::GenerateRequest;
using paceline::v1::GenerateResponse;
using paceline::v1::InferenceService;

namespace {

GenerateRequest MakeRequest(const std::string& prompt) {
  GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(100);
  return request;
}

std::shared_ptr<grpc::ClientContext> MakeContext() {
  auto context = std::make_shared<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  const char* key = std::getenv("PACELINE_API_KEY");
  if (key != nullptr && *key != '\0') context->AddMetadata("authorization", std::string("Bearer ") + key);
  return context;
}

// A signal handler may not call gRPC; a thread that waits for the signal may. Every thread has to block it, so this comes first.
void CancelOnInterrupt(std::shared_ptr<grpc::ClientContext> context) {
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  std::thread([context, interrupt] {
    int signal = 0;
    sigwait(&interrupt, &signal);
    context->TryCancel();
  }).detach();
}

// The events are Accepted, PrefillDone, Delta, Progress, Migrated and Finish.
void Show(const GenerateResponse& response) {
  if (response.has_delta()) std::cout << response.delta().text() << std::flush;
  if (!response.has_finish()) return;
  const auto& finish = response.finish();
  std::cerr << "\n"
            << paceline::v1::FinishReason_Name(finish.reason()) << ": " << finish.usage().output_tokens()
            << " tokens, " << finish.usage().cached_tokens() << " cached, " << finish.timeline().prefill_worker()
            << " -> " << finish.timeline().decode_worker() << "\n";
}

void ShowDetail(const google::protobuf::Any& detail) {
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  if (detail.UnpackTo(&info)) {
    std::cerr << "  reason: " << info.reason() << "\n";
    for (const auto& [name, value] : info.metadata()) std::cerr << "  " << name << ": " << value << "\n";
  } else if (detail.UnpackTo(&retry)) {
    const double seconds = retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9;
    std::cerr << "  retry after: " << std::fixed << std::setprecision(1) << seconds << " s\n";
  }
}

// Says how the call ended, with what the server tells about a refusal, and gives the exit status.
int Report(const grpc::Status& status) {
  if (status.ok()) return 0;
  if (status.error_code() == grpc::StatusCode::CANCELLED) {
    std::cerr << "\ncancelled\n";
    return 130;
  }
  std::cerr << "error: " << status.error_message() << "\n";
  google::rpc::Status refusal;
  refusal.ParseFromString(status.error_details());
  for (const auto& detail : refusal.details()) ShowDetail(detail);
  return 1;
}

int Generate(const std::string& address, const std::string& prompt) {
  const auto context = MakeContext();
  CancelOnInterrupt(context);
  const auto stub =
      InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  const auto reader = stub->Generate(context.get(), MakeRequest(prompt));
  GenerateResponse response;
  while (reader->Read(&response)) Show(response);
  return Report(reader->Finish());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2) return Generate("127.0.0.1:50051", argv[1]);
  if (argc == 4 && argv[1] == std::string("--address")) return Generate(argv[2], argv[3]);
  std::cerr << "usage: generate [--address HOST:PORT] PROMPT\n";
  return 2;
}

#!/usr/bin/env ruby
# Streams one answer from a Paceline server.
#
#   ./build
#   ./generate.rb [--address 127.0.0.1:50051] "What is the capital of France?"
#
# The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.

$LOAD_PATH.unshift(File.join(__dir__, "out"))

require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "grpc"
require "optparse"
require "paceline/v1/inference_services_pb"

USAGE = "usage: generate.rb [--address HOST:PORT] PROMPT"

def main
  address = "127.0.0.1:50051"
  OptionParser.new { |options| options.on("--address HOST:PORT") { |given| address = given } }.parse!
  abort_with_usage unless ARGV.size == 1
  exit generate(address, ARGV.first)
rescue OptionParser::ParseError
  abort_with_usage
end

def abort_with_usage
  warn USAGE
  exit 2
end

def generate(address, prompt)
  stub = Paceline::V1::InferenceService::Stub.new(address, :this_channel_is_insecure)
  call = stub.generate(request(prompt), metadata: key, deadline: Time.now + 120, return_op: true)
  # A signal handler may not wait for gRPC's lock; a thread may.
  trap("INT") { Thread.new { call.cancel } }
  call.execute.each { |response| show(response) }
  0
rescue GRPC::Cancelled
  warn "\ncancelled"
  130
rescue GRPC::BadStatus => refusal
  report(refusal)
  1
end

def request(prompt)
  Paceline::V1::GenerateRequest.new(
    chat: { messages: [{ role: "user", content: prompt }] },
    sampling: { temperature: 0 },
    stopping: { max_tokens: 100 }
  )
end

def key
  given = ENV.fetch("PACELINE_API_KEY", "")
  given.empty? ? {} : { "authorization" => "Bearer #{given}" }
end

# response.event names the field that is set: accepted, prefill_done, delta, progress, migrated or finish.
def show(response)
  case response.event
  when :delta
    $stdout.print(response.delta.text)
    $stdout.flush
  when :finish
    usage, timeline = response.finish.usage, response.finish.timeline
    workers = "#{timeline.prefill_worker} -> #{timeline.decode_worker}"
    warn "\n#{response.finish.reason}: #{usage.output_tokens} tokens, #{usage.cached_tokens} cached, #{workers}"
  end
end

# Says what the server tells about a refusal.
def report(refusal)
  warn "error: #{refusal.details}"
  details = refusal.to_rpc_status&.details || []
  details.each do |detail|
    if detail.is(Google::Rpc::ErrorInfo)
      info = detail.unpack(Google::Rpc::ErrorInfo)
      warn "  reason: #{info.reason}"
      info.metadata.each { |name, value| warn "  #{name}: #{value}" }
    elsif detail.is(Google::Rpc::RetryInfo)
      delay = detail.unpack(Google::Rpc::RetryInfo).retry_delay
      warn format("  retry after: %.1f s", delay.seconds + delay.nanos / 1e9)
    end
  end
end

main

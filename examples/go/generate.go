// Streams one answer from a Paceline server.
//
//	./build
//	out/generate [--address 127.0.0.1:50051] "What is the capital of France?"
//
// The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	paceline "paceline/v1"
)

func main() {
	address := flag.String("address", "127.0.0.1:50051", "HOST:PORT of the server")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: generate [--address HOST:PORT] PROMPT")
		os.Exit(2)
	}
	// Ctrl-C ends this context, and the call with it.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := generate(ctx, *address, flag.Arg(0))
	stop()
	os.Exit(report(err))
}

func generate(ctx context.Context, address, prompt string) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(withKey(ctx), 2*time.Minute)
	defer cancel()
	stream, err := paceline.NewInferenceServiceClient(connection).Generate(ctx, request(prompt))
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		show(response)
	}
}

func withKey(ctx context.Context) context.Context {
	key := os.Getenv("PACELINE_API_KEY")
	if key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
}

func request(prompt string) *paceline.GenerateRequest {
	messages := []*paceline.ChatMessage{{Role: "user", Content: prompt}}
	return &paceline.GenerateRequest{
		Prompt:   &paceline.GenerateRequest_Chat{Chat: &paceline.Chat{Messages: messages}},
		Sampling: &paceline.SamplingParams{Temperature: proto.Float32(0)},
		Stopping: &paceline.StopConditions{MaxTokens: proto.Uint32(100)},
	}
}

// The events are Accepted, PrefillDone, Delta, Progress, Migrated and Finish.
func show(response *paceline.GenerateResponse) {
	switch event := response.Event.(type) {
	case *paceline.GenerateResponse_Delta:
		fmt.Print(event.Delta.Text)
	case *paceline.GenerateResponse_Finish:
		usage, timeline := event.Finish.Usage, event.Finish.Timeline
		fmt.Fprintf(os.Stderr, "\n%s: %d tokens, %d cached, %s -> %s\n", event.Finish.Reason,
			usage.OutputTokens, usage.CachedTokens, timeline.PrefillWorker, timeline.DecodeWorker)
	}
}

// Says how the call ended, with what the server tells about a refusal, and gives the exit status.
func report(err error) int {
	if err == nil {
		return 0
	}
	refusal := status.Convert(err)
	if refusal.Code() == codes.Canceled {
		fmt.Fprintln(os.Stderr, "\ncancelled")
		return 130
	}
	fmt.Fprintf(os.Stderr, "error: %s\n", refusal.Message())
	for _, detail := range refusal.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(os.Stderr, "  reason: %s\n", detail.Reason)
			for name, value := range detail.Metadata {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", name, value)
			}
		case *errdetails.RetryInfo:
			delay := detail.RetryDelay
			seconds := float64(delay.Seconds) + float64(delay.Nanos)/1e9
			fmt.Fprintf(os.Stderr, "  retry after: %.1f s\n", seconds)
		}
	}
	return 1
}

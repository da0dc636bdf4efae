// Streams one answer from a Paceline server.
//
//   ./build
//   out/generate [--address 127.0.0.1:50051] "What is the capital of France?"
//
// The API key, for a server that wants one, is in PACELINE_API_KEY. Ctrl-C cancels the request on the server.

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import google.rpc.Refusal;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Locale;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import paceline.v1.Generation.SamplingParams;
import paceline.v1.Generation.StopConditions;
import paceline.v1.Inference.Chat;
import paceline.v1.Inference.ChatMessage;
import paceline.v1.Inference.Finish;
import paceline.v1.Inference.GenerateRequest;
import paceline.v1.Inference.GenerateResponse;
import paceline.v1.InferenceServiceGrpc;

public final class Generate {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  // Text is UTF-8, whatever this machine's locale.
  private static final PrintStream OUT = utf8(FileDescriptor.out);
  private static final PrintStream ERR = utf8(FileDescriptor.err);

  public static void main(String[] args) throws InvalidProtocolBufferException {
    if (args.length == 1) {
      System.exit(generate("127.0.0.1:50051", args[0]));
    }
    if (args.length == 3 && args[0].equals("--address")) {
      System.exit(generate(args[1], args[2]));
    }
    ERR.println("usage: generate [--address HOST:PORT] PROMPT");
    System.exit(2);
  }

  private static int generate(String address, String prompt) throws InvalidProtocolBufferException {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    Context.CancellableContext context = Context.current().withCancellation();
    CountDownLatch ended = cancelOnInterrupt(context);
    Context before = context.attach();
    try {
      InferenceServiceGrpc.newBlockingStub(channel)
          .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(key()))
          .withDeadlineAfter(2, TimeUnit.MINUTES)
          .generate(request(prompt))
          .forEachRemaining(Generate::show);
      return 0;
    } catch (StatusRuntimeException refusal) {
      return report(refusal);
    } finally {
      context.detachAndCancel(before, null);
      channel.shutdownNow();
      ended.countDown();
    }
  }

  // Ctrl-C ends the process with status 130, after this hook: it waits until the call has ended and said so.
  private static CountDownLatch cancelOnInterrupt(Context.CancellableContext context) {
    CountDownLatch ended = new CountDownLatch(1);
    Runnable hook =
        () -> {
          context.cancel(null);
          try {
            ended.await(5, TimeUnit.SECONDS);
          } catch (InterruptedException again) {
            Thread.currentThread().interrupt();
          }
        };
    Runtime.getRuntime().addShutdownHook(new Thread(hook));
    return ended;
  }

  private static Metadata key() {
    Metadata metadata = new Metadata();
    String key = System.getenv().getOrDefault("PACELINE_API_KEY", "");
    if (!key.isEmpty()) {
      metadata.put(AUTHORIZATION, "Bearer " + key);
    }
    return metadata;
  }

  private static GenerateRequest request(String prompt) {
    ChatMessage message = ChatMessage.newBuilder().setRole("user").setContent(prompt).build();
    return GenerateRequest.newBuilder()
        .setChat(Chat.newBuilder().addMessages(message))
        .setSampling(SamplingParams.newBuilder().setTemperature(0))
        .setStopping(StopConditions.newBuilder().setMaxTokens(100))
        .build();
  }

  // The events are Accepted, PrefillDone, Delta, Progress, Migrated and Finish.
  private static void show(GenerateResponse response) {
    if (response.hasDelta()) {
      OUT.print(response.getDelta().getText());
      OUT.flush();
    }
    if (response.hasFinish()) {
      Finish finish = response.getFinish();
      ERR.printf(
          "%n%s: %d tokens, %d cached, %s -> %s%n",
          finish.getReason(),
          finish.getUsage().getOutputTokens(),
          finish.getUsage().getCachedTokens(),
          finish.getTimeline().getPrefillWorker(),
          finish.getTimeline().getDecodeWorker());
    }
  }

  // Says how the call ended, with what the server tells about a refusal, and gives the exit status.
  private static int report(StatusRuntimeException refusal) throws InvalidProtocolBufferException {
    Status status = refusal.getStatus();
    if (status.getCode() == Status.Code.CANCELLED) {
      ERR.println("\ncancelled");
      return 130;
    }
    ERR.println("error: " + status.getDescription());
    Metadata trailers = refusal.getTrailers();
    byte[] details = trailers == null ? null : trailers.get(DETAILS);
    if (details != null) {
      for (Any detail : Refusal.Status.parseFrom(details).getDetailsList()) {
        showDetail(detail);
      }
    }
    return 1;
  }

  private static void showDetail(Any detail) throws InvalidProtocolBufferException {
    if (detail.is(Refusal.ErrorInfo.class)) {
      Refusal.ErrorInfo info = detail.unpack(Refusal.ErrorInfo.class);
      ERR.println("  reason: " + info.getReason());
      info.getMetadataMap().forEach((name, value) -> ERR.println("  " + name + ": " + value));
    }
    if (detail.is(Refusal.RetryInfo.class)) {
      com.google.protobuf.Duration delay = detail.unpack(Refusal.RetryInfo.class).getRetryDelay();
      double seconds = delay.getSeconds() + delay.getNanos() / 1e9;
      ERR.println(String.format(Locale.ROOT, "  retry after: %.1f s", seconds));
    }
  }

  private static PrintStream utf8(FileDescriptor file) {
    return new PrintStream(new FileOutputStream(file), true, StandardCharsets.UTF_8);
  }
}

package tracing

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

const (
	// queued is how many spans wait at most: some megabytes.
	queued = 2048
	// together is how many spans are sent at once at most.
	together = 512
	// gatherTime is how long the first span of a batch waits for others.
	gatherTime = 2 * time.Second
	// exportTime bounds the sending of a batch, with its retries.
	exportTime = 10 * time.Second
	// tellEvery is the least time between two log lines about lost spans.
	tellEvery = time.Minute
)

// queue hands ended spans to an exporter, in batches, by one goroutine. What does not fit
// into it is dropped and counted; the SDK's own batch processor does not count what it
// drops.
type queue struct {
	logger   logr.Logger
	exporter sdktrace.SpanExporter
	spans    chan sdktrace.ReadOnlySpan
	flushes  chan chan struct{}
	dropped  atomic.Int64 // since it was last told

	base  context.Context // of all exports
	abort context.CancelFunc
	stop  sync.Once
	ends  chan struct{} // closed by Shutdown
	ended chan struct{} // closed when the goroutine has returned
}

func newQueue(logger logr.Logger, exporter sdktrace.SpanExporter) *queue {
	q := &queue{
		logger: logger, exporter: exporter, spans: make(chan sdktrace.ReadOnlySpan, queued),
		flushes: make(chan chan struct{}), ends: make(chan struct{}), ended: make(chan struct{}),
	}
	q.base, q.abort = context.WithCancel(context.Background())
	go q.run()
	return q
}

// OnStart implements sdktrace.SpanProcessor.
func (q *queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd implements sdktrace.SpanProcessor. It does not block.
func (q *queue) OnEnd(span sdktrace.ReadOnlySpan) {
	select {
	case <-q.ends:
		return
	default:
	}
	select {
	case q.spans <- span:
	default:
		q.dropped.Add(1)
	}
}

// ForceFlush implements sdktrace.SpanProcessor: it waits until all spans that ended before
// were sent or given up.
func (q *queue) ForceFlush(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case q.flushes <- done:
	case <-q.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Shutdown implements sdktrace.SpanProcessor. It sends the spans that wait, until ctx ends.
func (q *queue) Shutdown(ctx context.Context) error {
	q.stop.Do(func() { close(q.ends) })
	defer context.AfterFunc(ctx, q.abort)()
	<-q.ended // an export ends with q.base
	q.abort()
	return q.exporter.Shutdown(ctx)
}

// run sends spans until Shutdown.
func (q *queue) run() {
	defer close(q.ended)
	var last error             // why a batch was not taken
	var told time.Time         // when lost spans were last told
	var later <-chan time.Time // when they may be told again, if there are any
	tell := func() {
		later = nil
		if lost := q.dropped.Swap(0); lost > 0 {
			q.logger.Error(last, "Spans are lost: the collector of --tracing-endpoint does not take them, or not as fast as they come", "spans", lost)
			last, told = nil, time.Now()
		}
	}
	send := func(batch []sdktrace.ReadOnlySpan) {
		if err := q.export(batch); err != nil {
			q.dropped.Add(int64(len(batch)))
			last = err
		}
		switch wait := tellEvery - time.Since(told); {
		case q.dropped.Load() == 0 || later != nil:
		case wait <= 0:
			tell()
		default:
			later = time.After(wait)
		}
	}
	for {
		select {
		case span := <-q.spans:
			send(q.gather(span, time.After(gatherTime)))
		case done := <-q.flushes:
			q.drain(send)
			close(done)
		case <-later:
			tell()
		case <-q.ends:
			q.drain(send)
			tell()
			return
		}
	}
}

// gather returns a batch that begins with a span, after a while or when it is full.
func (q *queue) gather(first sdktrace.ReadOnlySpan, due <-chan time.Time) []sdktrace.ReadOnlySpan {
	batch := []sdktrace.ReadOnlySpan{first}
	for len(batch) < together {
		select {
		case span := <-q.spans:
			batch = append(batch, span)
		case <-due:
			return q.fill(batch)
		case <-q.ends:
			return q.fill(batch)
		}
	}
	return batch
}

// fill adds to a batch what is there.
func (q *queue) fill(batch []sdktrace.ReadOnlySpan) []sdktrace.ReadOnlySpan {
	for len(batch) < together && len(q.spans) > 0 { // nobody else takes any
		batch = append(batch, <-q.spans)
	}
	return batch
}

// drain sends all that waits.
func (q *queue) drain(send func([]sdktrace.ReadOnlySpan)) {
	for len(q.spans) > 0 {
		send(q.fill(nil))
	}
}

func (q *queue) export(batch []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithTimeout(q.base, exportTime)
	defer cancel()
	return q.exporter.ExportSpans(ctx, batch)
}

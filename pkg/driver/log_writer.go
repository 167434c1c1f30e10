package driver

import (
	"bytes"
	"io"
	"sync"
	"time"
)

const (
	// maxLogQueue is how much of the log waits for who reads it, in bytes.
	maxLogQueue = 1 << 20
	// maxKeptLines is how much memory is kept for the next lines, in bytes.
	maxKeptLines = 64 << 10
	// logDrain is how long the end of the log may take to be written.
	logDrain = time.Second
)

// logWriter writes the log by a goroutine of its own: whoever reads it may stop doing so, and
// no call, probe or signal waits for that. What has no room is left out, and counted; the last lines
// before a crash may be lost.
type logWriter struct {
	out     io.Writer
	leftOut func(lines int) // is told of lines that were lost, once others are written again
	done    chan struct{}   // closed when the goroutine has ended

	mu      sync.Mutex
	waiting []byte // whole lines
	lost    int    // lines
	wake    chan struct{}
	ended   bool
}

// newLogWriter starts the goroutine, which End ends.
func newLogWriter(out io.Writer, leftOut func(lines int)) *logWriter {
	w := &logWriter{out: out, leftOut: leftOut, done: make(chan struct{}), wake: make(chan struct{}, 1)}
	go w.run()
	return w
}

// Write implements io.Writer for whole lines. It does not block, and does not fail.
func (w *logWriter) Write(lines []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended || len(w.waiting)+len(lines) > maxLogQueue {
		w.lost += bytes.Count(lines, []byte("\n"))
		return len(lines), nil
	}
	w.waiting = append(w.waiting, lines...)
	select {
	case w.wake <- struct{}{}:
	default: // it is awake
	}
	return len(lines), nil
}

func (w *logWriter) run() {
	defer close(w.done)
	var lines []byte
	for range w.wake {
		if cap(lines) > maxKeptLines {
			lines = nil
		}
		w.mu.Lock()
		lines, w.waiting = w.waiting, lines[:0]
		lost := w.lost
		w.lost = 0
		w.mu.Unlock()
		_, _ = w.out.Write(lines) // there is nowhere else to tell
		if lost > 0 {
			w.leftOut(lost)
		}
	}
}

// End writes what waits, for at most logDrain.
func (w *logWriter) End() {
	w.mu.Lock()
	if !w.ended {
		w.ended = true
		close(w.wake)
	}
	w.mu.Unlock()
	select {
	case <-w.done:
	case <-time.After(logDrain):
	}
}

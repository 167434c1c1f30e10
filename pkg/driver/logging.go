package driver

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/command"
)

// The formats of --logging-format, by the names that Kubernetes gives them.
const (
	textFormat = "text"
	jsonFormat = "json"
)

// loggingFlags are how a plugin logs.
type loggingFlags struct {
	format    string
	verbosity int
}

// begin makes the logger of the process, which writes to the tail, and to standard error until end.
// It is called once, before anything is logged.
func (f loggingFlags) begin(tail *logTail) (end func(), err error) {
	if f.verbosity < 0 {
		return nil, command.WrongUse("--v %d: must not be negative", f.verbosity)
	}
	if f.format != textFormat && f.format != jsonFormat {
		return nil, command.WrongUse("--logging-format %q: must be %s or %s", f.format, textFormat, jsonFormat)
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // who reads the log may end: that is an error, and no reason to die
	stderr := newLogWriter(os.Stderr, func(lines int) {
		klog.ErrorS(nil, "Nobody read the log for a while, and lines of it were left out", "lines", lines)
	})
	end = func() { klog.Flush(); stderr.End() }
	out := io.MultiWriter(tail, stderr)
	settings := map[string]string{"v": strconv.Itoa(f.verbosity)}
	switch f.format {
	case textFormat: // to one writer in place of klog's own files
		settings["logtostderr"], settings["one_output"], settings["stderrthreshold"] = "false", "true", "FATAL"
	case jsonFormat:
		klog.SetLoggerWithOptions(jsonLogger(out, f.verbosity), klog.ContextualLogger(true))
	}
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	for name, value := range settings {
		if err := flags.Set(name, value); err != nil {
			end()
			return nil, err
		}
	}
	klog.SetOutput(out)
	return end, nil
}

// ended returns why the plugin ended. If who reads the log expects an object a line, the
// last line is one as well, and nobody prints the error again.
func (f loggingFlags) ended(err error, o Options) error {
	if err == nil || f.format != jsonFormat {
		return err
	}
	klog.ErrorS(errors.New(o.inOwnName(err.Error())), "Ended")
	return loggedError{err}
}

// loggedError is an error that is in the log.
type loggedError struct{ error }

func (e loggedError) Unwrap() error { return e.error }

// jsonLogger returns a logger that writes an object a line, with the keys that
// Kubernetes uses: ts in milliseconds since 1970, caller, msg, v (not for errors) and err.
func jsonLogger(out io.Writer, verbosity int) logr.Logger {
	return logr.FromSlogHandler(slog.NewJSONHandler(out, &slog.HandlerOptions{
		AddSource: true, Level: slog.Level(-verbosity), ReplaceAttr: jsonAttribute,
	}))
}

// jsonAttribute writes what text logs would: what something prints of itself, which is
// also where secrets are left out, and never its fields. What panics at that, such as a nil
// pointer, is written as the panic.
func jsonAttribute(groups []string, a slog.Attr) (written slog.Attr) {
	defer func() {
		if p := recover(); p != nil {
			written = slog.String(a.Key, fmt.Sprintf("<panic: %v>", p))
		}
	}()
	value := a.Value.Any()
	if len(groups) == 0 {
		switch a.Key {
		case slog.TimeKey:
			if a.Value.Kind() == slog.KindTime { // else it is a caller's
				return slog.Float64("ts", float64(a.Value.Time().UnixMicro())/1000)
			}
		case slog.LevelKey:
			if level, is := value.(slog.Level); is && level <= 0 {
				return slog.Int("v", int(-level))
			}
			return slog.Attr{}
		case slog.SourceKey:
			if source, is := value.(*slog.Source); is {
				return slog.String("caller", filepath.Base(source.File)+":"+strconv.Itoa(source.Line))
			}
		}
	}
	if m, is := value.(logr.Marshaler); is {
		value = m.MarshalLog()
	}
	switch v := value.(type) {
	case time.Duration:
		return slog.String(a.Key, v.String())
	case time.Time: // as JSON has it
		return a
	case error:
		return slog.String(a.Key, v.Error())
	case fmt.Stringer:
		return slog.String(a.Key, v.String())
	}
	return slog.Any(a.Key, value)
}

// maxLogTail is how much of the log's end is kept in memory, in bytes.
const maxLogTail = 256 << 10

// logTail keeps the end of the log, for `csi-node report`. Its methods may be called
// concurrently. The zero value is ready.
type logTail struct {
	mu   sync.Mutex
	text []byte
}

// Write implements io.Writer.
func (t *logTail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p[max(len(p)-maxLogTail, 0):]...)
	if len(t.text) > 2*maxLogTail { // so that not each line moves all others
		t.text = t.text[:copy(t.text, t.text[len(t.text)-maxLogTail:])]
	}
	return len(p), nil
}

// String returns the whole lines among the last maxLogTail bytes.
func (t *logTail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.text) <= maxLogTail {
		return string(t.text)
	}
	_, lines, _ := strings.Cut(string(t.text[len(t.text)-maxLogTail:]), "\n")
	return lines
}

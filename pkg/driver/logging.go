package driver

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// logSettings are how a plugin logs.
type logSettings struct {
	verbosity int
	format    string // textLog or jsonLog
}

const (
	textLog = "text"
	jsonLog = "json"
)

// begin makes the log go to standard error and to the tail.
func (l logSettings) begin(tail *logTail) error {
	switch l.format {
	case textLog:
		return l.set(io.MultiWriter(os.Stderr, tail), map[string]string{"logtostderr": "false", "one_output": "true", "stderrthreshold": "FATAL"})
	case jsonLog:
		if err := l.set(io.MultiWriter(os.Stderr, tail), nil); err != nil {
			return err
		}
		klog.SetSlogLogger(slog.New(jsonHandler(io.MultiWriter(os.Stderr, tail), l.verbosity)))
		return nil
	}
	return fmt.Errorf("--log-format %q: must be %s or %s", l.format, textLog, jsonLog)
}

// set sets klog up, which logs as text.
func (l logSettings) set(out io.Writer, more map[string]string) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	for name, value := range more {
		if err := flags.Set(name, value); err != nil {
			return err
		}
	}
	klog.SetOutput(out)
	return flags.Set("v", strconv.Itoa(l.verbosity))
}

// jsonHandler logs an object a line: time, level, msg, and the key/values. Errors and
// what has a text of its own are that text.
func jsonHandler(out io.Writer, verbosity int) slog.Handler {
	return slog.NewJSONHandler(out, &slog.HandlerOptions{
		Level: slog.Level(-verbosity), // as package logr maps them
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.LevelKey {
				level, _ := a.Value.Any().(slog.Level)
				return slog.String(a.Key, map[bool]string{true: "error", false: "info"}[level >= slog.LevelError])
			}
			switch v := a.Value.Any().(type) {
			case logr.Marshaler:
				return slog.Any(a.Key, v.MarshalLog())
			case error:
				return slog.String(a.Key, v.Error())
			case fmt.Stringer:
				if a.Value.Kind() != slog.KindTime {
					return slog.String(a.Key, v.String())
				}
			}
			return a
		},
	})
}

// mostLogged is how much of the log's end is kept in memory, in bytes.
const mostLogged = 256 << 10

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
	t.text = append(t.text, p[max(len(p)-mostLogged, 0):]...)
	if len(t.text) > 2*mostLogged { // so that not each line moves all others
		t.text = append([]byte(nil), t.text[len(t.text)-mostLogged:]...)
	}
	return len(p), nil
}

// String returns the whole lines among the last mostLogged bytes.
func (t *logTail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.text) <= mostLogged {
		return string(t.text)
	}
	_, lines, _ := strings.Cut(string(t.text[len(t.text)-mostLogged:]), "\n")
	return lines
}

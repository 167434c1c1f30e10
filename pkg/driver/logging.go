package driver

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
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

type loggingFlags struct {
	format    string
	verbosity int
}

// setLogging makes the logger of the process. It is called once, before anything is
// logged.
func setLogging(f loggingFlags) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Set("v", strconv.Itoa(f.verbosity)); err != nil {
		return err
	}
	switch f.format {
	case textFormat:
	case jsonFormat:
		klog.SetLoggerWithOptions(jsonLogger(os.Stderr, f.verbosity), klog.ContextualLogger(true))
	default:
		return command.WrongUse("--logging-format %q: must be %s or %s", f.format, textFormat, jsonFormat)
	}
	return nil
}

// jsonLogger returns a logger that writes an object a line, with the keys that
// Kubernetes uses: ts in milliseconds since 1970, caller, msg, v (not for errors) and err.
func jsonLogger(out io.Writer, verbosity int) logr.Logger {
	return logr.FromSlogHandler(slog.NewJSONHandler(out, &slog.HandlerOptions{
		AddSource: true, Level: slog.Level(-verbosity), ReplaceAttr: jsonAttribute,
	}))
}

// jsonAttribute writes what text logs would: what something prints of itself, which is
// also where secrets are left out, and never its fields.
func jsonAttribute(groups []string, a slog.Attr) slog.Attr {
	value := a.Value.Any()
	if len(groups) == 0 {
		switch a.Key {
		case slog.TimeKey:
			return slog.Float64("ts", float64(a.Value.Time().UnixMicro())/1000)
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

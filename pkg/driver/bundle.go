package driver

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
)

// bundle is what somebody who debugs the plugin wants to know about a node: texts, from
// which `csi-node report` makes one archive. It holds neither secrets nor the names of
// files on volumes.
type bundle []bundleFile

// bundleFile is one text of a bundle.
type bundleFile struct {
	Name string
	What string // is in it
	Text string // at most maxBundleText bytes
}

// Bounds of a bundle.
const (
	maxBundleText = 1 << 20 // bytes of each text: with all of them, an archive unpacks to less than 16 MiB
	maxExplained  = 100     // volumes

	// textTimeout is how long the plugin is asked for one text. A disk that hangs holds up a
	// few texts, and must leave time for the others.
	textTimeout = 10 * time.Second
)

// readBundle reads all that a bundle has, from the plugin that runs on the state directory
// or, if none does, from its store and the kernel. A text that cannot be read is replaced
// by the error. log is a part of the plugin's log, which is added; it may be empty. Nothing
// is changed. ctx bounds the requests to the plugin.
func readBundle(ctx context.Context, stateDir string, o Options, log string) bundle {
	var b bundle
	add := func(name, what string, read func(context.Context, io.Writer) error) {
		ctx, cancel := context.WithTimeout(ctx, textTimeout)
		defer cancel()
		var text bytes.Buffer
		if err := read(ctx, &text); err != nil {
			fmt.Fprintf(&text, "\nThis could not be read, or not all of it: %v\n", err)
		}
		b = append(b, bundleFile{name, what, bounded(redactSecretWords(text.String()))})
	}
	var node report.Node
	var nodeErr error
	status := func(write func(io.Writer) error) func(context.Context, io.Writer) error {
		return func(_ context.Context, out io.Writer) error {
			if nodeErr != nil { // nothing is known: an empty report would say that nothing is asked for
				return nodeErr
			}
			return write(out)
		}
	}
	asked := func(path string) func(context.Context, io.Writer) error {
		return func(ctx context.Context, out io.Writer) error { return askText(ctx, stateDir, path, out) }
	}
	add("about.json", "versions, settings, and the plugin's process", func(ctx context.Context, out io.Writer) error {
		err := readAbout(ctx, stateDir, o, out)
		node, nodeErr = ReadReport(ctx, stateDir, o)
		return err
	})
	add("status.txt", "what `status --output wide` prints", status(func(out io.Writer) error { return node.PrintWide(out) }))
	add("status.json", "the same as JSON", status(func(out io.Writer) error { return command.WriteJSON(out, node) }))
	// Those that ask no disk come first.
	add("goroutines.txt", "what the plugin's goroutines do", asked("/goroutines"))
	add("log.txt", fmt.Sprintf("the last %d KiB of the running plugin's log", maxLogTail>>10), asked("/log"))
	if log != "" {
		add("log-given.txt", "the end of the log that --log names", func(_ context.Context, out io.Writer) error {
			_, err := io.WriteString(out, log[max(len(log)-maxBundleText, 0):])
			return err
		})
	}
	add("metrics.txt", "the plugin's metrics", asked("/metrics"))
	ours := oursOf(stateDir, node)
	add("mounts.txt", "the mounts of volumes, as the kernel has them", func(_ context.Context, out io.Writer) error { return readMounts(ours, out) })
	add("devices.txt", "the loop devices of volumes, as sysfs has them", func(_ context.Context, out io.Writer) error { return readDevices(ours, out) })
	add("kernel.txt", "the kernel, its file systems, and the tools", readKernel)
	add("explain.txt", fmt.Sprintf("what `explain` prints, of %d volumes at most, those that fail first", maxExplained), func(ctx context.Context, out io.Writer) error {
		if nodeErr != nil {
			return nodeErr
		}
		return explainAll(ctx, stateDir, o, node, out)
	})
	add("volumes.json", "the volumes that the backends have", func(ctx context.Context, out io.Writer) error {
		all, err := readInventory(ctx, stateDir, o)
		if err != nil {
			return err
		}
		return command.WriteJSON(out, all)
	})
	add("orphans.json", "what `orphans` finds", func(ctx context.Context, out io.Writer) error {
		found, err := readOrphans(ctx, stateDir, o)
		if err != nil {
			return err
		}
		return command.WriteJSON(out, found)
	})
	return b
}

// bounded cuts a text that is too long.
func bounded(text string) string {
	const cut = "\n[the rest is left out]\n"
	if len(text) <= maxBundleText {
		return text
	}
	return strings.ToValidUTF8(text[:maxBundleText-len(cut)], "") + cut
}

// secretWords matches what looks like a secret with its name, wherever it comes from.
// Nothing that the plugin writes should hold one. The value is the text in quotes, in
// escaped quotes (JSON in a quoted text), or one word; a quote that is not closed makes it
// the rest of the line.
var secretWords = regexp.MustCompile(`(?i)([a-z_-]*(?:password|passwd|passphrase|secret|token|credential|private[_-]?key)[a-z0-9_-]*(?:\\*["'])?\s*[=:]\s*)` +
	`("(?:\\.|[^"\n])*"?|\\+"(?:\\{2,}"|[^"\n])*"?|'[^'\n]*'?|[^\s,;"'}\]]+)`)

func redactSecretWords(text string) string {
	return secretWords.ReplaceAllString(text, "${1}(left out)")
}

// about is what is told of the plugin and of the program that makes the bundle.
type about struct {
	Made     time.Time      `json:"made"`
	Version  string         `json:"version"` // of the program that made it
	Go       string         `json:"go"`
	Platform string         `json:"platform"`
	Plugin   *runningPlugin `json:"plugin,omitempty"` // nil: none runs
	// Settings are those of the last plugin that ran here, as it left them.
	Settings json.RawMessage `json:"settings,omitempty"`
}

// runningPlugin is what a plugin tells of itself.
type runningPlugin struct {
	Version  string        `json:"version"`
	Go       string        `json:"go"`
	PID      int           `json:"pid"`
	Routines int           `json:"goroutines"`
	Backends []string      `json:"backends"`
	Config   Config        `json:"config"`
	Most     runtimeLimits `json:"limits"`
}

type runtimeLimits struct {
	Processors  int   `json:"processors"`
	MemoryLimit int64 `json:"goMemoryLimit"` // bytes
}

func (p *plugin) about() runningPlugin {
	cfg := p.Config
	cfg.BackendFlags = maps.Clone(cfg.BackendFlags)
	return runningPlugin{
		Version: p.options.version(), Go: runtime.Version(), PID: os.Getpid(), Routines: runtime.NumGoroutine(), Backends: p.devices.Names(), Config: cfg,
		Most: runtimeLimits{runtime.GOMAXPROCS(0), memoryLimit()},
	}
}

func readAbout(ctx context.Context, stateDir string, o Options, out io.Writer) error {
	a := about{Made: time.Now().UTC(), Version: o.version(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	var running runningPlugin
	err := ask(ctx, stateDir, "GET", "/about", &running)
	if err == nil {
		a.Plugin = &running
	}
	if raw, failed := os.ReadFile(filepath.Join(stateDir, settingsFile)); failed != nil {
		err = errors.Join(err, failed)
	} else if json.Valid(raw) {
		a.Settings = raw
	}
	return errors.Join(command.WriteJSON(out, a), err)
}

// explainAll explains the volumes of a report, those that fail first.
func explainAll(ctx context.Context, stateDir string, o Options, node report.Node, out io.Writer) error {
	order := report.Conditions()
	node.Volumes = slices.Clone(node.Volumes)
	slices.SortStableFunc(node.Volumes, func(a, b report.Status) int {
		return cmp.Compare(slices.Index(order, b.Worst()), slices.Index(order, a.Worst()))
	})
	var ids []string
	for _, r := range node.Refusals {
		ids = append(ids, r.Volume)
	}
	for _, id := range node.IDs() {
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	left := len(ids)
	for _, id := range ids[:min(len(ids), maxExplained)] {
		if ctx.Err() != nil {
			break
		}
		left--
		explanation, err := readExplanation(ctx, stateDir, id, o)
		if err != nil {
			fmt.Fprintf(out, "volume %s\n\n  It cannot be explained: %v\n", id, err)
		} else if err := explanation.Print(out); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	if left > 0 {
		fmt.Fprintf(out, "%d more volumes are left out.\n", left)
	}
	return nil
}

func writeGoroutines(out io.Writer) error { return pprof.Lookup("goroutine").WriteTo(out, 1) }

// write writes the archive, a gzipped tar with one directory.
func (b bundle) write(out io.Writer, made time.Time) error {
	zipped := gzip.NewWriter(out)
	archive := tar.NewWriter(zipped)
	for _, f := range b {
		header := &tar.Header{Name: "csi-node-report/" + f.Name, Mode: 0o600, Size: int64(len(f.Text)), ModTime: made, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := io.WriteString(archive, f.Text); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), zipped.Close())
}

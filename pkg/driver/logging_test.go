package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func TestLogAsJSON(t *testing.T) {
	var out bytes.Buffer
	logger := logr.FromSlogHandler(jsonHandler(&out, 2))
	logger.V(2).Info("Step done", "part", state.StagePart(), "took", 1500*time.Millisecond, "volumes", 3)
	logger.V(4).Info("Called")
	logger.Error(errors.New("boom"), "Call failed", "request", withoutSecrets{&csi.NodeStageVolumeRequest{VolumeId: "v", Secrets: map[string]string{"key": "hunter2"}}})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || strings.Contains(out.String(), "hunter2") {
		t.Fatalf("logged is %s", out.String())
	}
	for i, want := range []map[string]any{
		{slog.LevelKey: "info", slog.MessageKey: "Step done", "part": "stage", "took": "1.5s", "volumes": 3.0},
		{slog.LevelKey: "error", slog.MessageKey: "Call failed", "err": "boom"},
	} {
		var got map[string]any
		require.NoError(t, json.Unmarshal([]byte(lines[i]), &got))
		for key, value := range want {
			if got[key] != value {
				t.Errorf("%s is %v, not %v, in %s", key, got[key], value, lines[i])
			}
		}
		if at, _ := got[slog.TimeKey].(string); at == "" {
			t.Errorf("no time in %s", lines[i])
		}
		if request, _ := got["request"].(string); i == 1 && !strings.Contains(request, `"volume_id":"v"`) {
			t.Errorf("the request is %q", request)
		}
	}
}

func TestLogFormat(t *testing.T) {
	err := logSettings{format: "xml"}.begin(&logTail{})
	if err == nil || !strings.Contains(err.Error(), `--log-format "xml": must be text or json`) {
		t.Errorf("a format that is none: %v", err)
	}
}

func TestLogTailIsBounded(t *testing.T) {
	var tail logTail
	line := strings.Repeat("x", 99) + "\n"
	for range 10 * mostLogged / len(line) {
		if n, err := tail.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	if text := tail.String(); len(text) > mostLogged || len(text) < mostLogged-len(line) || !strings.HasPrefix(text, line) || len(tail.text) > 3*mostLogged {
		t.Errorf("%d bytes are kept, and %d told", len(tail.text), len(text))
	}
	if n, err := tail.Write(bytes.Repeat([]byte("y"), 10*mostLogged)); n != 10*mostLogged || err != nil || len(tail.text) > 3*mostLogged {
		t.Errorf("of a long line %d are kept (%d, %v)", len(tail.text), n, err)
	}
}

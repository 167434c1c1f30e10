package driver

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

func (b bundle) text(t *testing.T, name string) string {
	t.Helper()
	i := slices.IndexFunc(b, func(f bundleFile) bool { return f.Name == name })
	if i < 0 {
		t.Fatalf("there is no %s", name)
	}
	return b[i].Text
}

// A report holds what is wrong, with a plugin and without one, and no secret.
func TestBundle(t *testing.T) {
	c := testConfig(t)
	c.log = &logTail{}
	conn, stop := serving(t, c)
	createVolume(t, c, csi.NewControllerClient(conn), "vol")
	node := csi.NewNodeClient(conn)
	stage := &csi.NodeStageVolumeRequest{VolumeId: "vol", StagingTargetPath: filepath.Join(c.KubeletDir, "stage"), VolumeCapability: rawCapability(), Secrets: map[string]string{"key": "hunter2"}}
	_, err := node.NodeStageVolume(t.Context(), stage)
	require.NoError(t, err)
	_, err = node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "stranger", StagingTargetPath: filepath.Join(c.KubeletDir, "other"), VolumeCapability: rawCapability()})
	if err == nil {
		t.Fatal("a stranger is staged")
	}
	_, _ = c.log.Write([]byte("a line with password=hunter2\n"))
	o := testOptions()
	with := readBundle(t.Context(), c.StateDir, o, "")
	for name, words := range map[string][]string{
		"about.json":     {`"plugin": {`, c.KubeletDir, "driverName"},
		"status.txt":     {"vol", "settled", "volume stranger: NodeStageVolume was refused"},
		"status.json":    {`"running": true`},
		"explain.txt":    {"volume vol\n", "volume stranger\n", "NodeStageVolume asked"},
		"volumes.json":   {`"id": "vol"`},
		"orphans.json":   {"["},
		"metrics.txt":    {"csi_node_volumes"},
		"goroutines.txt": {"goroutine profile"},
		"log.txt":        {"a line with password=(left out)"},
		"mounts.txt":     {"other mounts are left out"},
		"devices.txt":    {"/volumes/vol/data"},
		"kernel.txt":     {"kernel: ", "mkfs.ext4: "},
	} {
		text := with.text(t, name)
		for _, word := range words {
			if !strings.Contains(text, word) {
				t.Errorf("no %q in %s:\n%s", word, name, text)
			}
		}
		if strings.Contains(text, "could not be read") {
			t.Errorf("%s:\n%s", name, text)
		}
	}
	for _, f := range with {
		if strings.Contains(f.Text, "hunter2") || len(f.Text) > maxBundleText {
			t.Errorf("%s has %d bytes, with a secret: %t", f.Name, len(f.Text), strings.Contains(f.Text, "hunter2"))
		}
	}
	require.NoError(t, stop())
	without := readBundle(t.Context(), c.StateDir, o, "the log of before\n")
	for name, word := range map[string]string{
		"about.json": "no plugin runs", "status.txt": "No plugin is running.", "explain.txt": "volume vol", "volumes.json": `"id": "vol"`, "log.txt": "no plugin runs",
		"log-given.txt": "the log of before", "kernel.txt": "kernel: ", "devices.txt": "/volumes/vol/data",
	} {
		if text := without.text(t, name); !strings.Contains(text, word) {
			t.Errorf("without a plugin no %q in %s:\n%s", word, name, text)
		}
	}
	conn, _ = serving(t, c) // takes up what is there, and ends it
	_, err = csi.NewNodeClient(conn).NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath})
	require.NoError(t, err)
}

// A disk that hangs holds up what asks it, and nothing else that the report is for.
func TestBundleWhileADiskHangs(t *testing.T) {
	dir := t.TempDir()
	socket, err := net.Listen("unix", filepath.Join(dir, statusSocket))
	require.NoError(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/volumes", "/orphans":
			<-r.Context().Done() // its client has gone
		case "/log", "/goroutines", "/metrics":
			fmt.Fprintln(w, "the text of", r.URL.Path)
		default:
			fmt.Fprintln(w, "{}")
		}
	})}
	go func() { _ = server.Serve(socket) }()
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // less than for all texts
	defer cancel()
	b := readBundle(ctx, dir, testOptions(), "")
	for _, name := range []string{"log", "goroutines", "metrics"} {
		if text := b.text(t, name+".txt"); text != "the text of /"+name+"\n" {
			t.Errorf("%s: %s", name, text)
		}
	}
	if text := b.text(t, "volumes.json"); !strings.Contains(text, "could not be read") {
		t.Errorf("the volumes: %s", text)
	}
}

// Of a plugin that does not answer it is not told that none runs, nor that nothing is asked of it.
func TestBundleOfAPluginThatHangs(t *testing.T) {
	dir := t.TempDir()
	socket, err := net.Listen("unix", filepath.Join(dir, statusSocket))
	require.NoError(t, err)
	defer socket.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	b := readBundle(ctx, dir, testOptions(), "")
	for _, name := range []string{"status.txt", "status.json", "volumes.json", "orphans.json", "explain.txt"} {
		if text := b.text(t, name); !strings.HasPrefix(text, "\nThis could not be read") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// Even where nothing ever ran there is something to send.
func TestBundleOfNothing(t *testing.T) {
	for _, f := range readBundle(t.Context(), t.TempDir(), testOptions(), "") {
		if f.Text == "" {
			t.Errorf("%s is empty", f.Name)
		}
	}
}

func TestBundleIsBounded(t *testing.T) {
	if text := bounded(strings.Repeat("ü", maxBundleText)); len(text) > maxBundleText || !strings.HasSuffix(text, "is left out]\n") {
		t.Errorf("%d bytes are left", len(text))
	}
	var many report.Node
	for i := range 3 * maxExplained {
		many.Volumes = append(many.Volumes, report.Status{Volume: strings.Repeat("v", i+1)})
	}
	var text strings.Builder
	require.NoError(t, explainAll(t.Context(), t.TempDir(), Options{}, many, &text))
	if n := strings.Count(text.String(), "cannot be explained"); n != maxExplained || !strings.Contains(text.String(), "200 more volumes are left out.") {
		t.Errorf("%d are explained", n)
	}
	many.Refusals = []report.Refusal{{Volume: "refused"}}
	text.Reset()
	require.NoError(t, explainAll(t.Context(), t.TempDir(), Options{}, many, &text))
	if !strings.HasPrefix(text.String(), "volume refused\n") {
		t.Errorf("first is %.80s", text.String())
	}
}

func TestSecretWordsAreLeftOut(t *testing.T) {
	for text, want := range map[string]string{
		`mount -o username=x,password=hunter2,ro`: `mount -o username=x,password=(left out),ro`,
		`{"api-token":"hunter2","a":"b"}`:         `{"api-token":(left out),"a":"b"}`,
		"passphrase: 'hunter2 and more'\nnext":    "passphrase: (left out)\nnext",
		"PRIVATE_KEY=hunter2":                     "PRIVATE_KEY=(left out)",
		"the secrets of volume v":                 "the secrets of volume v",
		"encryptionPassphrasePrevious: hunter2":   "encryptionPassphrasePrevious: (left out)",
		`{"password":"hunter\"2","a":"b"}`:        `{"password":(left out),"a":"b"}`,
		`err="{\"password\":\"hunter2\"} x" a=b`:  `err="{\"password\":(left out)} x" a=b`,
		`{\"password\":\"hun\\\"ter2\",\"a\":1}`:  `{\"password\":(left out),\"a\":1}`,
		"password=\"hunter2 and more\nnext":       "password=(left out)\nnext",
	} {
		if got := redactSecretWords(text); got != want {
			t.Errorf("of %q is left %q, not %q", text, got, want)
		}
	}
}

func TestMountsOfOthersAreLeftOut(t *testing.T) {
	u := ours{driver: "csi.test", dirs: []string{"/run/x", "/var/lib/x/pool"}, paths: []string{"/kubelet/pods/1/volumes/kubernetes.io~csi/v/mount"}}
	for point, want := range map[string]bool{
		"/kubelet/pods/1/volumes/kubernetes.io~csi/v/mount":                  true,
		"/kubelet/pods/2/volumes/kubernetes.io~csi/v/mount":                  false,
		"/kubelet/plugins/kubernetes.io/csi/csi.test/0123/globalmount":       true,
		"/kubelet/plugins/kubernetes.io/csi/csi.test.other/0123/globalmount": false,
		"/kubelet/plugins/csi.test-ephemeral/csi-1":                          true,
		"/var/lib/x/pool": true, "/var/lib/x": true, "/var/lib": true, "/": false, "/home/someone": false, "/run/x": true,
	} {
		if got := u.mount(point); got != want {
			t.Errorf("%s is ours: %t", point, got)
		}
	}
	if got, want := withoutValues("rw,noatime,errors=remount-ro,password=x,lowerdir=/home/a:b"), "rw,noatime,errors=remount-ro,password=…,lowerdir=…"; got != want {
		t.Errorf("the options are %s, not %s", got, want)
	}
}

// What is in it is shown before anything is written, and nothing is overwritten.
func TestReportCommand(t *testing.T) {
	dir := t.TempDir()
	run := func(args ...string) (string, string, error) {
		var out, errs bytes.Buffer
		cmd := Command(testOptions())
		cmd.SetArgs(append([]string{"report", "--state-dir", dir}, args...))
		cmd.SetIn(strings.NewReader("given\n"))
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		err := cmd.ExecuteContext(t.Context())
		return out.String(), errs.String(), err
	}
	out, _, err := run()
	if err != nil || !strings.Contains(out, "status.txt") || !strings.Contains(out, "Nothing is written yet") {
		t.Errorf("prints %s (%v)", out, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("written is %v (%v)", entries, err)
	}
	if out, _, err := run("--stdout", "--log", "-"); err != nil || !strings.Contains(out, "==> kernel.txt") || !strings.Contains(out, "given\n") {
		t.Errorf("prints %s (%v)", out, err)
	}
	file := filepath.Join(dir, "report.tar.gz")
	if out, _, err := run("--file", file); err != nil || !strings.Contains(out, file+" is written") {
		t.Errorf("prints %s (%v)", out, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v (%v)", info, err)
	}
	// A file that cannot be made is an error before all the work, of which nothing is listed.
	if out, _, err := run("--file", file); !errors.Is(err, os.ErrExist) || out != "" {
		t.Errorf("over a file that is there: %v, and prints %s", err, out)
	}
	if out, _, err := run("--file", filepath.Join(dir, "none", "x")); !errors.Is(err, os.ErrNotExist) || out != "" {
		t.Errorf("in a directory that is not there: %v, and prints %s", err, out)
	}
	if _, _, err := run("--file", file, "--stdout"); err == nil {
		t.Error("both at once")
	}
	archive, listing, err := run("--file", "-", "--log", file)
	if err != nil || !strings.Contains(listing, "log-given.txt") {
		t.Errorf("lists %s (%v)", listing, err)
	}
	zipped, err := gzip.NewReader(strings.NewReader(archive))
	require.NoError(t, err)
	var names []string
	for files := tar.NewReader(zipped); ; {
		header, err := files.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		names = append(names, header.Name)
		if text, err := io.ReadAll(files); err != nil || int64(len(text)) != header.Size {
			t.Errorf("%s has %d bytes (%v)", header.Name, len(text), err)
		}
	}
	if len(names) != 13 || names[0] != "csi-node-report/about.json" {
		t.Errorf("the archive has %q", names)
	}
}

// The file is there once all is known, and not while a node is asked that may hang: who ends the
// command by force may run it again.
func TestReportIsWrittenAtTheEnd(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "report.tar.gz")
	listener, err := net.Listen("unix", filepath.Join(dir, statusSocket))
	require.NoError(t, err)
	var asked atomic.Int64
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file is there while the plugin is asked (%v)", err)
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	})}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	cmd := Command(testOptions())
	cmd.SetArgs([]string{"report", "--state-dir", dir, "--file", file})
	cmd.SetOut(io.Discard)
	require.NoError(t, cmd.ExecuteContext(t.Context()))
	require.NoError(t, server.Close())
	<-ended
	if _, err := os.Stat(file); err != nil || asked.Load() == 0 {
		t.Errorf("the plugin was asked %d times (%v)", asked.Load(), err)
	}
}

// A watch prints what changed, and says once what it cannot read.
func TestWatchStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		cmd := Command(testOptions())
		cmd.SetContext(ctx)
		var out, errs bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		reads := 0
		err := command.Watch(cmd, watchEvery, "json", func(context.Context) (report.Node, error) {
			reads++
			switch reads {
			case 1, 2: // they differ in an age alone
				step := &report.StepStatus{Step: "format", Age: time.Duration(reads)}
				return report.Node{Running: true, Volumes: []report.Status{{Volume: "v", Step: step, Parts: []report.PartStatus{{Part: "stage", Is: report.UnderWay}}}}}, nil
			case 3, 4:
				return report.Node{}, errors.New("away")
			case 5:
				return report.Node{Running: true}, nil
			}
			stop()
			return report.Node{}, errors.New("stopped")
		}, report.Node.WithoutAges, func(node report.Node) error { return command.Output("json").PrintTables(&out, node) })
		require.NoError(t, err)
		seen := 0
		for d := json.NewDecoder(&out); d.More(); seen++ {
			var node report.Node
			require.NoError(t, d.Decode(&node))
		}
		if seen != 2 || strings.Count(errs.String(), "away") != 1 {
			t.Errorf("%d reports, and %q", seen, errs.String())
		}
	})
}

package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/client"
	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/test/require"
)

// fill puts the paths of a test into an expectation.
func (p *fakePlugin) fill(text string) string {
	paths := client.DefaultPaths(filepath.Join(p.Dir, "kubelet"), "fake.example", "vol")
	return strings.NewReplacer("{dir}", p.Dir, "{staging}", paths.Staging, "{target}", paths.Target).Replace(text)
}

// What each command asks of a plugin, and what it prints.
func TestVolumeCommands(t *testing.T) {
	const (
		mountCapability = `"volumeCapability":{"mount":{},"accessMode":{"mode":"SINGLE_NODE_MULTI_WRITER"}}`
		blockCapability = `"volumeCapability":{"block":{},"accessMode":{"mode":"SINGLE_NODE_MULTI_WRITER"}}`
	)
	noStaging := func(p *fakePlugin) {
		p.node = slices.DeleteFunc(p.node, func(c nodeCapability) bool { return c == csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME })
	}
	for name, row := range map[string]struct {
		args   string
		plugin func(*fakePlugin)
		calls  []call
		out    string
	}{
		"create": {
			"create vol --size 1.5Gi", nil,
			[]call{{"CreateVolume", `{"name":"vol","capacityRange":{"requiredBytes":"1610612736"},"volumeCapabilities":[{"mount":{},"accessMode":{"mode":"SINGLE_NODE_MULTI_WRITER"}}]}`}},
			"VOLUME  SIZE                CONTEXT\nid-vol  1.5Gi (1610612736)  a=1,b=2\n",
		},
		"create, all flags": {
			"create vol --size 5000 --fs-type xfs --mount-flag noatime --mount-flag nodev --access-mode ReadWriteOncePod --parameter a=b=c --parameter d= --secret key=@{dir}/secret --output json", nil,
			[]call{{"CreateVolume", `{"name":"vol","capacityRange":{"requiredBytes":"5000"},"volumeCapabilities":[{"mount":{"fsType":"xfs","mountFlags":["noatime","nodev"]},"accessMode":{"mode":"SINGLE_NODE_SINGLE_WRITER"}}],"parameters":{"a":"b=c","d":""},"secrets":{"key":"very\nsecret"}}`}},
			"{\n  \"volume\": {\n    \"capacityBytes\": \"5000\",\n    \"volumeId\": \"id-vol\",\n    \"volumeContext\": {\n      \"a\": \"1\",\n      \"b\": \"2\"\n    }\n  }\n}\n",
		},
		"create without a size": {
			"create vol --block --access-mode ReadWriteMany", nil,
			[]call{{"CreateVolume", `{"name":"vol","volumeCapabilities":[{"block":{},"accessMode":{"mode":"MULTI_NODE_MULTI_WRITER"}}]}`}},
			"VOLUME  SIZE        CONTEXT\nid-vol  4Ki (4096)  a=1,b=2\n",
		},
		"create, driver of an older CSI": {
			"create vol", func(p *fakePlugin) { p.node = nil },
			[]call{{"CreateVolume", `{"name":"vol","volumeCapabilities":[{"mount":{},"accessMode":{"mode":"SINGLE_NODE_WRITER"}}]}`}},
			"VOLUME  SIZE        CONTEXT\nid-vol  4Ki (4096)  a=1,b=2\n",
		},
		"create, mode of CSI": {
			"create vol --access-mode SINGLE_NODE_READER_ONLY", nil,
			[]call{{"CreateVolume", `{"name":"vol","volumeCapabilities":[{"mount":{},"accessMode":{"mode":"SINGLE_NODE_READER_ONLY"}}]}`}},
			"VOLUME  SIZE        CONTEXT\nid-vol  4Ki (4096)  a=1,b=2\n",
		},
		"delete": {
			"delete vol", nil,
			[]call{{"DeleteVolume", `{"volumeId":"vol"}`}},
			"Volume vol is deleted.\n",
		},
		"list": {
			"list", nil,
			[]call{{"ListVolumes", `{}`}, {"ListVolumes", `{"startingToken":"vol-b"}`}, {"ListVolumes", `{"startingToken":"vol-c"}`}},
			"VOLUME  SIZE\nvol-a   1Gi (1073741824)\nvol-b   2Gi (2147483648)\nvol-c   3Gi (3221225472)\n",
		},
		"list, JSON": {
			"list --output json", func(p *fakePlugin) { p.volumes = p.volumes[:1] },
			[]call{{"ListVolumes", `{}`}},
			"{\n  \"entries\": [\n    {\n      \"volume\": {\n        \"capacityBytes\": \"1073741824\",\n        \"volumeId\": \"vol-a\"\n      }\n    }\n  ]\n}\n",
		},
		"list of none": {
			"list", func(p *fakePlugin) { p.volumes = nil },
			[]call{{"ListVolumes", `{}`}},
			"There are no volumes.\n",
		},
		"stage": {
			"stage vol --context a=b --publish-context lun=7", nil,
			[]call{{"NodeStageVolume", `{"volumeId":"vol","publishContext":{"lun":"7"},"stagingTargetPath":"{staging}",` + mountCapability + `,"volumeContext":{"a":"b"}}`}},
			"Volume vol is staged at {staging}.\n",
		},
		"stage, paths and secrets": {
			"stage vol --block --staging-path {dir}/new/stage --secret key=@{dir}/secret --output json", nil,
			[]call{{"NodeStageVolume", `{"volumeId":"vol","stagingTargetPath":"{dir}/new/stage",` + blockCapability + `,"secrets":{"key":"very\nsecret"}}`}},
			"{\n  \"volumeId\": \"vol\",\n  \"stagingTargetPath\": \"{dir}/new/stage\",\n  \"result\": \"staged\"\n}\n",
		},
		"stage, driver without": {
			"stage vol", noStaging, nil,
			"There is nothing to do: the driver does not stage volumes, it publishes them at once.\n",
		},
		"publish": {
			"publish vol --read-only --publish-context lun=7", nil,
			[]call{{"NodePublishVolume", `{"volumeId":"vol","publishContext":{"lun":"7"},"stagingTargetPath":"{staging}","targetPath":"{target}",` + mountCapability + `,"readonly":true}`}},
			"Volume vol is published at {target}.\n",
		},
		"publish, driver without staging": {
			"publish vol --target {dir}/new/target --context a=b", noStaging,
			[]call{{"NodePublishVolume", `{"volumeId":"vol","targetPath":"{dir}/new/target",` + mountCapability + `,"volumeContext":{"a":"b"}}`}},
			"Volume vol is published at {dir}/new/target.\n",
		},
		"unpublish": {
			"unpublish vol --target {dir}/target", nil,
			[]call{{"NodeUnpublishVolume", `{"volumeId":"vol","targetPath":"{dir}/target"}`}},
			"Volume vol is not published at {dir}/target any more.\n",
		},
		"unstage": {
			"unstage vol", nil,
			[]call{{"NodeUnstageVolume", `{"volumeId":"vol","stagingTargetPath":"{staging}"}`}},
			"Volume vol is not staged at {staging} any more.\n",
		},
		"unstage, driver without": {
			"unstage vol --output json", noStaging, nil,
			"{\n  \"volumeId\": \"vol\",\n  \"result\": \"nothing to do: the driver does not stage volumes\"\n}\n",
		},
		"expand": {
			"expand vol --size 1Gi", nil,
			[]call{{"NodeExpandVolume", `{"volumeId":"vol","volumePath":"{staging}","capacityRange":{"requiredBytes":"1073741824"},"stagingTargetPath":"{staging}",` + mountCapability + `}`}},
			"VOLUME  SIZE\nvol     1Gi (1073741824)\n",
		},
		"expand, by the controller too": {
			"expand vol --size 1Gi --path {dir}/target --output json",
			func(p *fakePlugin) {
				p.controller = []controllerCapability{csi.ControllerServiceCapability_RPC_EXPAND_VOLUME}
			},
			[]call{
				{"ControllerExpandVolume", `{"volumeId":"vol","capacityRange":{"requiredBytes":"1073741824"},` + mountCapability + `}`},
				{"NodeExpandVolume", `{"volumeId":"vol","volumePath":"{dir}/target","capacityRange":{"requiredBytes":"1073741824"},"stagingTargetPath":"{staging}",` + mountCapability + `}`},
			},
			"{\n  \"capacityBytes\": \"1073741825\"\n}\n",
		},
		"expand, by the controller alone": {
			"expand vol --size 1Gi",
			func(p *fakePlugin) {
				p.controller, p.nodeNotNeeded = []controllerCapability{csi.ControllerServiceCapability_RPC_EXPAND_VOLUME}, true
			},
			[]call{{"ControllerExpandVolume", `{"volumeId":"vol","capacityRange":{"requiredBytes":"1073741824"},` + mountCapability + `}`}},
			"VOLUME  SIZE\nvol     1.0Gi (1073741825)\n",
		},
		"stats": {
			"stats vol", nil,
			[]call{{"NodeGetVolumeStats", `{"volumeId":"vol","volumePath":"{staging}","stagingTargetPath":"{staging}"}`}},
			"At {staging}:\nUNIT    TOTAL             USED              AVAILABLE\nbytes   3Gi (3221225472)  1Gi (1073741824)  2.0Gi (2147483643)\ninodes  100               1                 99\n",
		},
		"stats with an age": {
			"stats vol --path {dir}/target --output json", func(p *fakePlugin) { p.age = "12" },
			[]call{{"NodeGetVolumeStats", `{"volumeId":"vol","volumePath":"{dir}/target","stagingTargetPath":"{staging}"}`}},
			"{\n  \"ageSeconds\": \"12\",\n  \"usage\": [\n    {\n      \"available\": \"2147483643\",\n      \"total\": \"3221225472\",\n      \"used\": \"1073741824\",\n      \"unit\": \"BYTES\"\n    },\n    {\n      \"available\": \"99\",\n      \"total\": \"100\",\n      \"used\": \"1\",\n      \"unit\": \"INODES\"\n    }\n  ],\n  \"volumePath\": \"{dir}/target\"\n}\n",
		},
		"capabilities": {
			"capabilities", func(p *fakePlugin) { p.node = p.node[:2] }, nil,
			"driver           fake.example\nversion          v9\nready            yes\nplugin           CONTROLLER_SERVICE\ncontroller       CREATE_DELETE_VOLUME\ncontroller       LIST_VOLUMES\n" +
				"node             STAGE_UNSTAGE_VOLUME\nnode             EXPAND_VOLUME\nnode id          node-7\nvolumes at most  16\ntopology         rack=r2,zone=z1\n",
		},
		"capabilities of a node alone": {
			"capabilities", func(p *fakePlugin) { p.noController, p.notReady, p.node = true, true, nil }, nil,
			"driver           fake.example\nversion          v9\nready            no: it is starting\nplugin           CONTROLLER_SERVICE\nnode id          node-7\nvolumes at most  16\ntopology         rack=r2,zone=z1\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newFakePlugin(t)
			require.NoError(t, os.WriteFile(filepath.Join(p.Dir, "secret"), []byte("very\nsecret\n"), 0o600))
			if strings.HasPrefix(name, "unpublish") {
				require.NoError(t, os.Mkdir(filepath.Join(p.Dir, "target"), 0o750))
			}
			if row.plugin != nil {
				row.plugin(p)
			}
			out, err := run(t, append([]string{"volume"}, strings.Fields(p.fill(row.args))...)...)
			require.NoError(t, err)
			if want := p.fill(row.out); out != want {
				t.Errorf("prints\n%s\nnot\n%s", out, want)
			}
			calls := p.requests()
			for i, c := range row.calls {
				row.calls[i] = call{c.method, p.fill(c.request)}
			}
			if !slices.Equal(calls, row.calls) {
				t.Errorf("asks\n%q\nnot\n%q", calls, row.calls)
			}
		})
	}
}

func TestCapabilitiesAsJSON(t *testing.T) {
	p := newFakePlugin(t)
	p.noController = true
	out, err := run(t, "volume", "capabilities", "--output", "json")
	var got struct {
		Info       struct{ Name string }
		Controller *struct{}
		Node       struct{ Capabilities []any }
		NodeInfo   struct{ NodeID string }
	}
	if err == nil {
		err = json.Unmarshal([]byte(out), &got)
	}
	if err != nil || got.Info.Name != "fake.example" || got.Controller != nil || len(got.Node.Capabilities) != len(p.node) || got.NodeInfo.NodeID != "node-7" {
		t.Errorf("%+v (%v) in %s", got, err, out)
	}
}

// A capability that the driver lacks is reported before the driver is called.
func TestVolumeCommandsNotOffered(t *testing.T) {
	for args, word := range map[string]string{
		"create vol":            "CREATE_DELETE_VOLUME",
		"delete vol":            "CREATE_DELETE_VOLUME",
		"list":                  "LIST_VOLUMES",
		"stats vol":             "GET_VOLUME_STATS",
		"expand vol --size 1Gi": "EXPAND_VOLUME",
		"publish vol --access-mode ReadWriteOncePod": "SINGLE_NODE_MULTI_WRITER",
	} {
		for _, noController := range []bool{false, true} {
			p := newFakePlugin(t)
			p.node, p.controller, p.noController = nil, nil, noController
			out, err := run(t, append([]string{"volume"}, strings.Fields(args)...)...)
			if out != "" || command.ExitCode(err) != 1 || !strings.Contains(err.Error(), word) || len(p.requests()) > 0 {
				t.Errorf("%s prints %q; %v", args, out, err)
			}
		}
	}
}

func TestVolumeErrors(t *testing.T) {
	p := newFakePlugin(t)
	for code, words := range map[codes.Code]string{
		codes.DeadlineExceeded:   "repeat the command to join",
		codes.FailedPrecondition: "put that right",
		codes.NotFound:           "check the volume's id",
		codes.Internal:           "see the plugin's log",
	} {
		p.fail = status.Error(code, "so it is")
		for _, args := range []string{"create vol", "delete vol", "list", "stage vol", "publish vol", "unpublish vol", "unstage vol", "expand vol --size 1", "stats vol"} {
			out, err := run(t, append([]string{"volume"}, strings.Fields(args)...)...)
			if out != "" || command.ExitCode(err) != 1 || !strings.Contains(err.Error(), code.String()+": so it is") || !strings.Contains(err.Error(), words) {
				t.Errorf("%s prints %q; %v", args, out, err)
			}
		}
		// A call that may go on keeps its directories, one that was refused does not.
		_, err := os.Stat(filepath.Join(p.Dir, "kubelet"))
		if goesOn := code == codes.DeadlineExceeded; goesOn != (err == nil) {
			t.Errorf("after %s the directories are there: %v", code, err)
		}
		require.NoError(t, os.RemoveAll(filepath.Join(p.Dir, "kubelet")))
	}
	p.fail, p.endless = nil, true
	if _, err := run(t, "volume", "list"); err == nil || !strings.Contains(err.Error(), "again and again") {
		t.Errorf("of a list that never ends: %v", err)
	}
	require.NoError(t, os.Remove(filepath.Join(p.Dir, "csi.sock")))
	if _, err := run(t, "volume", "list"); command.ExitCode(err) != 1 || !strings.Contains(err.Error(), "is the plugin running") {
		t.Errorf("without a socket: %v", err)
	}
}

func TestDirectoriesAreTidied(t *testing.T) {
	p := newFakePlugin(t)
	for _, args := range []string{"stage vol", "publish vol", "unpublish vol", "unstage vol"} {
		if _, err := run(t, append([]string{"volume"}, strings.Fields(args)...)...); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(filepath.Dir(p.fill("{staging}")))
		if there := err == nil; there != (args != "unstage vol") {
			t.Errorf("after %s the volume's directory is there: %v", args, err)
		}
	}
}

// Wrong use of the other commands has the same exit code.
func TestExitCodeOfWrongUse(t *testing.T) {
	for _, args := range []string{"report --stdout --file x", "report --timeout 0s", "ui --port 65536", "ui --port -1", "help nonsense"} {
		if out, err := run(t, strings.Fields(args)...); out != "" || command.ExitCode(err) != 2 || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s prints %q; %v (exit code %d)", args, out, err, command.ExitCode(err))
		}
	}
}

func TestVolumeWrongUse(t *testing.T) {
	p := newFakePlugin(t)
	for _, row := range []struct{ args, word string }{
		{"nonsense", "nonsense"},
		{"create", "the NAME of the volume"},
		{"stage", "the id of the VOLUME"},
		{"stage a b", "one argument"},
		{"list a", "list"},
		{"create vol --size 1KB", "1KB"},
		{"create vol --size 0", "--size"},
		{"expand vol", "--size"},
		{"create vol --access-mode Often", "ReadWriteOncePod"},
		{"create vol --access-mode UNKNOWN", "--access-mode"},
		{"create vol --block --fs-type xfs", "--fs-type"},
		{"stage vol --block --mount-flag ro", "--mount-flag"},
		{"create vol --parameter a", "key=value"},
		{"create vol --parameter a=1 --parameter a=2", "twice"},
		{"stage vol --context =a", "key=value"},
		{"publish vol --publish-context lun", "--publish-context \"lun\": must be key=value"},
		{"stage vol --secret password=hunter2", "key=@file"},
		{"stage vol --secret hunter2", "key=@file"},
		{"stage vol --secret a=@x --secret a=@y", "twice"},
		{"stage vol --staging-path relative", "absolute"},
		{"publish vol --target relative", "absolute"},
		{"stats vol --path relative", "absolute"},
		{"stage vol --kubelet-dir relative", "absolute"},
		{"list --output xml", "table, json, yaml or wide"},
		{"list --timeout 0s", "--timeout"},
		{"list --timeout soon", "soon"},
		{"list --endpoint tcp://127.0.0.1:1", "unix://"},
		{"list --nonsense", "csi-node volume list --help"},
		{"retry", "the id of the VOLUME"},
		{"clear-device vol --output wide", "must be table, json or yaml"},
	} {
		out, err := run(t, append([]string{"volume"}, strings.Fields(row.args)...)...)
		if out != "" || command.ExitCode(err) != 2 || !strings.Contains(err.Error(), row.word) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s prints %q; %v (exit code %d)", row.args, out, err, command.ExitCode(err))
		}
	}
	if calls := p.requests(); len(calls) > 0 {
		t.Errorf("wrong uses asked %v", calls)
	}
	if _, err := run(t, "volume", "stage", "vol", "--secret", "key=@/no/such/file"); command.ExitCode(err) != 1 || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("a secret that is not there: %v", err)
	}
}

// completions returns the completions that the shell gets after the words.
func completions(t *testing.T, words ...string) []string {
	t.Helper()
	out, err := run(t, append([]string{"__complete"}, words...)...)
	require.NoError(t, err)
	var all []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, ":") {
			break
		}
		word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
		all = append(all, word)
	}
	return all
}

func TestCompletion(t *testing.T) {
	p := newFakePlugin(t)
	for _, row := range []struct {
		words string
		want  string
	}{
		{"volume stage ", "vol-a vol-b vol-c"},
		{"volume delete vol-", "vol-a vol-b vol-c"},
		{"volume clear-device ", "vol-a vol-b vol-c"},
		{"volume stage vol-a ", ""},
		{"volume create ", ""},
		{"volume create x --fs-type ", "ext4 xfs btrfs"},
		{"volume stage --output ", "table json yaml"},
		{"status --output ", "table json yaml wide"},
		{"volume stage --access-mode ", strings.Join(client.AccessModes(), " ")},
		{"volume retry ", ""},
	} {
		words := strings.Split(row.words, " ")
		if got := strings.Join(completions(t, words...), " "); got != row.want {
			t.Errorf("%q offers %q, not %q", row.words, got, row.want)
		}
	}
	p.controller = nil
	if got := completions(t, "volume", "stage", ""); len(got) > 0 {
		t.Errorf("a driver that lists nothing offers %q", got)
	}
	if got := completions(t, "volume", "stage", "--endpoint", "unix://"+p.Dir+"/none", ""); len(got) > 0 {
		t.Errorf("without a plugin %q is offered", got)
	}
}

// Completion gives up soon if the plugin does not answer.
func TestCompletionOfAHungPlugin(t *testing.T) {
	p := newFakePlugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cmd := find(t, "volume stage")
	cmd.SetContext(ctx)
	if ids, _ := command.CompleteVolume(cmd, nil, ""); len(ids) > 0 {
		t.Errorf("offers %q", ids)
	}
	if len(p.requests()) > 0 {
		t.Error("asks though its time is up")
	}
}

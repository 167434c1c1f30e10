package state

import (
	"reflect"
	"testing"
)

// What a context tells of the pod may come and go, and the latest is kept.
func TestPodInformationIsNoPartOfTheRequest(t *testing.T) {
	pod := map[string]string{
		"a": "1", "csi.storage.k8s.io/pod.name": "web-0", "csi.storage.k8s.io/pod.namespace": "shop",
		"csi.storage.k8s.io/pod.uid": "u", "csi.storage.k8s.io/serviceAccount.name": "default", "csi.storage.k8s.io/serviceAccount.tokens": "t", "csi.storage.k8s.io/ephemeral": "false",
		"csi.storage.k8s.io/pod.of-a-later-kubelet": "x",
	}
	plain := map[string]string{"a": "1"}
	for title, test := range map[string]struct{ have, asked map[string]string }{"on": {plain, pod}, "off": {pod, plain}} {
		t.Run(title, func(t *testing.T) {
			context := func(t *Target) { t.Context, t.Accepted = test.have, true }
			v := record(with("/a", context), acceptedStage, func(v *Volume) { v.Stage.Context = test.have })
			if err := v.AskPublish(aTarget("/a", func(t *Target) { t.Context = test.asked }), "/stage", editTime); err != nil {
				t.Fatal(err)
			}
			if have := v.Targets["/a"]; have.Revision != 2 || !have.Accepted || !reflect.DeepEqual(have.Context, test.asked) {
				t.Errorf("the target is %+v", have)
			}
			if err := v.AskStage(aStage(func(s *Stage) { s.Context = test.asked }), editTime); err != nil || v.Stage.Revision != 1 || !reflect.DeepEqual(v.Stage.Context, test.asked) {
				t.Errorf("the stage is %+v (%v)", v.Stage, err)
			}
		})
	}
	v := record(with("/a", func(t *Target) { t.Context, t.Accepted = plain, true }))
	for key, value := range map[string]string{"a": "2", "csi.storage.k8s.io/ephemeral": "true", "publish:csi.storage.k8s.io/pod.name": "x"} {
		other := map[string]string{"a": "1", key: value}
		if err := v.AskPublish(aTarget("/a", func(t *Target) { t.Context = other }), "/stage", editTime); ClassOf(err) != AlreadyExists {
			t.Errorf("with %s=%s: %v", key, value, err)
		}
	}
}

// What a backend says is no identity is replaced.
func TestDetailsOfThePublishContext(t *testing.T) {
	asked := func(publish map[string]string) func(*Stage) {
		return func(s *Stage) {
			s.Context = JoinContext(map[string]string{"v": "1"}, publish, func(key string) bool { return key != "portal" })
		}
	}
	v := record(acceptedStage, func(v *Volume) { asked(map[string]string{"lun": "1", "portal": "a"})(v.Stage) })
	if err := v.AskStage(aStage(asked(map[string]string{"lun": "1", "portal": "b"})), editTime); err != nil {
		t.Fatal(err)
	}
	if volume, publish := SplitContext(v.Stage.Context); !reflect.DeepEqual(volume, map[string]string{"v": "1"}) || !reflect.DeepEqual(publish, map[string]string{"lun": "1", "portal": "b"}) {
		t.Errorf("kept are %v and %v", volume, publish)
	}
	if err := v.AskStage(aStage(asked(map[string]string{"lun": "2", "portal": "b"})), editTime); ClassOf(err) != AlreadyExists {
		t.Errorf("another identity: %v", err)
	}
}

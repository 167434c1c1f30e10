//go:build upstream

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// systemctl is what tests call over SSH: this kubelet is nobody's service.
const systemctl = `#!/bin/bash
set -e
case "$*" in
"stop kubelet")
	pid=$(pidof kubelet) || exit 0
	kill $pid
	while [ -e /proc/$pid ]; do sleep 0.1; done ;;
"start kubelet")
	! pidof kubelet >/dev/null || exit 0
	setsid KUBELET >>LOG 2>&1 </dev/null & ;;
"show kubelet --property ActiveState --value")
	if pidof kubelet >/dev/null; then echo active; else echo inactive; fi ;;
*)
	echo "only stop, start and show of kubelet are here: $*" >&2
	exit 1 ;;
esac
`

// startSSH lets root log in to the node, and stop and start kubelet there by systemctl, as some tests of
// Kubernetes do. It returns the environment of whoever logs in.
func (c *cluster) startSSH() ([]string, error) {
	key, programs := c.file("ssh-key"), c.file("ssh-bin")
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("ssh-keygen: %w\n%s", err, out)
	}
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		return nil, err
	}
	kubelet := c.built["kubelet"] + " " + strings.Join(c.kubeletFlags(), " ")
	script := strings.NewReplacer("KUBELET", kubelet, "LOG", c.logs()+"/kubelet.log").Replace(systemctl)
	if err := errors.Join(
		os.MkdirAll("/run/sshd", 0o755), // this namespace's own
		os.MkdirAll(programs, 0o755),
		os.WriteFile(programs+"/systemctl", []byte(script), 0o755),
		os.WriteFile(programs+"/sudo", []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755), // root already; one of this machine has a PATH of its own
		c.writeFile("sshd_config", fmt.Sprintf(`ListenAddress %s:22
HostKey %s
AuthorizedKeysFile %s.pub
PermitRootLogin prohibit-password
StrictModes no
PidFile none
SetEnv PATH=%s:%s
`, nodeIP, key, key, programs, os.Getenv("PATH")))); err != nil {
		return nil, err
	}
	_, err = c.launch("sshd", sshd, "-D", "-e", "-f", c.file("sshd_config"))
	return []string{"KUBE_SSH_USER=root", "KUBE_SSH_KEY_PATH=" + key}, err
}

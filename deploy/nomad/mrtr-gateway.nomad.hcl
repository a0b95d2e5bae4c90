# Three replicas on Nomad (1.7 or newer), as containers. Not run by the tests. docs/engines.md explains each line.
job "mrtr-gateway" {
  type = "service"

  update {
    max_parallel     = 1 # the others begin the new calls of the one that ends
    health_check     = "checks"
    min_healthy_time = "5s"
    auto_revert      = true
  }

  group "gateway" {
    count          = 3
    shutdown_delay = "2s" # Consul stops listing the task before SIGTERM

    # The peers' port is the same everywhere, because a name service lists addresses without ports.
    constraint {
      distinct_hosts = true
    }

    network {
      port "http" {}
      port "peer" {
        static = 8081
      }
      port "admin" {}
    }

    service {
      name = "mrtr-gateway"
      port = "http"

      check {
        type     = "http"
        port     = "admin"
        path     = "/readyz"
        interval = "1s"
        timeout  = "1s"
      }
    }

    service {
      name = "mrtr-gateway-peer"
      port = "peer"
    }

    task "gateway" {
      driver = "docker"

      # hold.drain_delay_seconds + hold.drain_seconds + timeouts.cancel_seconds, and a little more. The client's
      # max_kill_timeout (30 s by default) must be at least as long.
      kill_timeout = "45s"
      kill_signal  = "SIGTERM"

      config {
        image        = "mrtr-gateway:0.1.0"
        network_mode = "host"
        args         = ["serve", "--config", "${NOMAD_TASK_DIR}/config.yaml"]
      }

      # Every allocation is a replica of its own. Consul's DNS lists the others: the machines must resolve `.consul`. A
      # list of peers from `service` would leave out a draining replica, which still holds calls.
      template {
        destination   = "local/config.yaml"
        change_mode   = "signal" # a reload drops nothing
        change_signal = "SIGHUP"
        data          = <<-YAML
          listen: 0.0.0.0:{{ env "NOMAD_PORT_http" }}
          admin: 0.0.0.0:{{ env "NOMAD_PORT_admin" }}
          state:
            keys_file: {{ env "NOMAD_SECRETS_DIR" }}/state_keys
          replica:
            id: "{{ env "NOMAD_ALLOC_ID" }}"
            listen: {{ env "NOMAD_ADDR_peer" }}
            peers_dns: mrtr-gateway-peer.service.consul:8081
          routes:
            - upstream: {url: "http://old-server.service.consul:9000/mcp"}
        YAML
      }

      template {
        destination = "secrets/state_keys"
        data        = "{{ with nomadVar \"nomad/jobs/mrtr-gateway\" }}{{ .state_keys }}{{ end }}\n"
      }

      resources {
        cpu    = 1000
        memory = 512
      }
    }
  }
}
